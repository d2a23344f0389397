"""The calls of outermost modules, which are the steps of a program that trains nothing."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from tb_memplugin.record.guard import Failed
from tb_memplugin.record.module_calls import ModuleCalls


class OutermostCalls:
    """Tells the calls of modules with parameters that are within no other module's call.

    Only those of the thread that makes the first one are told. A call is also told of to functions that begin
    to watch modules as it begins.

    Args:
        begins: is called before each call.
        ends: is called after it, also when it raised.
    """

    def __init__(self, begins: Callable[[], object], ends: Callable[[], object]) -> None:
        self._begins, self._ends = begins, ends
        self._calls = ModuleCalls()
        self._outermost: dict[int, weakref.ref[nn.Module]] = {}
        self._thread: int | None = None
        self._depth = 0

    def start(self, failed: Failed) -> None:
        """Begin to tell. `failed` is called if telling raises, which stops it.

        After `stop`, only calls of modules that were outermost before are told: it may be within such a call.
        """
        self._depth = 0
        known = [module for module in (each() for each in self._outermost.values()) if module is not None]
        for module in known:
            self._calls.watch(module, self._entered, self._left, failed)
        if not known:
            self._calls.watch_all(self._entered, self._left, failed)

    def stop(self) -> None:
        """Stop telling. Safe to call within the functions that are told, and twice."""
        self._calls.stop()

    def _entered(self, module: nn.Module, _: tuple[Any, ...], __: dict[str, Any]) -> None:
        thread = threading.get_ident()
        if self._thread not in (None, thread):
            return
        if not self._depth:
            if next(nn.Module.parameters(module), None) is None:
                return
            self._thread, self._depth = thread, 1
            self._outermost[id(module)] = weakref.ref(module)
            self._begins()
        else:
            self._depth += 1

    def _left(self, _: nn.Module, __: tuple[Any, ...], ___: Any) -> None:
        if self._depth and self._thread == threading.get_ident():
            self._depth -= 1
            if not self._depth:
                self._ends()
