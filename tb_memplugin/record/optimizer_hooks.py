"""Hooks around the step of every optimizer, which can be added and removed while other threads step.

torch calls such hooks while it iterates over the dictionary that contains them, and a training fails if one
is added or removed meanwhile ("OrderedDict mutated during iteration"). So, while hooks of this module are on,
torch iterates over a copy instead.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain
from time import time_ns
from typing import Any

from torch.optim import optimizer as torch_optimizer

from tb_memplugin.record import beside_compiler
from tb_memplugin.record.beside_compiler import skipped_by_dynamo
from tb_memplugin.record.guard import UNOWNED, Failed, call_all, entry, log_for_debugging

Hook = Callable[..., None]
"""A function that is called with the optimizer, and the positional and keyword arguments of its step."""


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """One step of an optimizer. Times are epoch nanoseconds.

    `parameters` are (module row, bytes) of the parameters that had a gradient, in the optimizer's order.
    """

    start_ns: int
    end_ns: int
    parameters: list[tuple[int, int]]


class StepStarts:
    """When the steps that run began: a step may call another's or that of its base class, and may raise."""

    def __init__(self) -> None:
        self._of: dict[int, list[int]] = {}

    def begin(self, optimizer: torch_optimizer.Optimizer) -> None:
        """Note that a step begins now."""
        self._of.setdefault(id(optimizer), []).append(time_ns())

    def end(self, optimizer: torch_optimizer.Optimizer) -> int | None:
        """Return when the step that ends now began, in epoch nanoseconds; None if that was not noted."""
        starts = self._of.get(id(optimizer))
        return starts.pop() if starts else None


_module: Any = torch_optimizer
_original: Any = getattr(_module, "chain", None)
"""The `chain` of torch's optimizer module; None in versions of torch that iterate in another way."""


def _copied(*several: Iterable[Any]) -> list[Any]:
    return [*chain(*several)]  # in one C call, which no other thread can interrupt


class _Chain:
    """An `itertools.chain` that copies all its items when called."""

    from_iterable = staticmethod(chain.from_iterable)
    __call__ = staticmethod(entry(_copied, UNOWNED.end, "the hooks of an optimizer", chain))


_at_once = _Chain()


class _Copies:
    """As long as one exists, torch iterates over copies of its dictionaries of hooks."""


_copies: weakref.ref[_Copies] | None = None


def _copy_hooks() -> _Copies:
    """Return the object to keep as long as there are hooks. torch is restored as it dies, by Python alone."""
    global _copies
    copies = _copies() if _copies is not None else None
    if copies is None:
        copies = _Copies()
        if _original is not None:
            weakref.finalize(copies, setattr, _module, "chain", _original).atexit = False
            _module.chain = _at_once
        _copies = weakref.ref(copies)
    return copies


class StepHooks:
    """Calls functions before (if given) and after every optimizer's step, on any thread, until `remove`.

    They are not called while torch.compile traces, nor within code that it compiled. What they raise is
    passed to `failed`. None: it is raised in the optimizer's step. `ends`: `after` is called last, because it
    may end what others record.
    """

    guarded = True  # a compiled step has guards on the dictionaries of hooks

    def __init__(
        self, before: Hook | None, after: Hook, failed: Failed | None = None, *, ends: bool = False
    ) -> None:
        if failed is not None:
            before = before and entry(before, failed, "the start of an optimizer's step", reads_tensors=True)
            after = entry(after, failed, "the end of an optimizer's step", reads_tensors=True)
        self._hooks, self.failed = (before, after), failed or UNOWNED.end
        self._handles: list[Any] = []
        self._copies: _Copies | None = None
        self._ends = ends
        self.is_wanted = True
        beside_compiler.add(self)

    def _remove(self) -> None:
        self.is_wanted = False
        beside_compiler.remove(self)

    remove = entry(_remove, None, "the end of hooks")
    """Remove the hooks. Safe to call twice."""

    def fail(self, where: str, error: BaseException) -> None:
        """Remove the hooks in a second way, where the first has failed."""
        self.is_wanted, self._copies = False, None
        if self in _on:
            _on.remove(self)
        while self._handles:
            self._handles.pop().remove()
        log_for_debugging(where, error)

    def put_on(self) -> None:
        """Add the hooks. torch's dictionaries of hooks are copied while there are any."""
        if self in _on:
            return
        self._copies = _copy_hooks()
        _on.append(self)
        before, after = self._hooks
        if before is not None:
            self._handles.append(torch_optimizer.register_optimizer_step_pre_hook(before))
        last: Any = torch_optimizer.register_optimizer_step_post_hook(after)
        last.hooks_dict_ref().move_to_end(last.id, last=self._ends)  # a window's run before what ends it
        self._handles.append(last)

    def take_off(self) -> None:
        """Remove the hooks for now, and those that could not be removed before."""
        for hooks in [each for each in _on if each is self or not each.is_wanted]:
            call_all(*(handle.remove for handle in hooks._handles))
            hooks._handles.clear()
            hooks._copies = None
            _on.remove(hooks)


_on: list[StepHooks] = []

for _function in (StepHooks.put_on, StepHooks.take_off):
    skipped_by_dynamo(_function)
