"""Hear of every window of torch.profiler: one patch of torch for all who listen, gone with the last of them.

torch calls a function just before each window, and another just after it (torch/autograd/profiler.py, torch
2.6 to 2.13). Patching these costs nothing while no profiler runs. A handler that is no longer used listens
until it is collected as garbage, because a profile refers to itself: other handlers' windows do not start it.
"""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any, Literal, Protocol

import torch
from torch.autograd import profiler as _profiler_module

from tb_memplugin.record.arguments import referents
from tb_memplugin.record.guard import call_all, entry, log_for_debugging, on_free
from tb_memplugin.record.torch_private.profiler import WINDOW_STARTS, WINDOW_STOPS

_torch: Any = _profiler_module
_lock = threading.RLock()


class Listener(Protocol):
    """Who hears of windows."""

    def start(self) -> None:
        """Hear that a window is about to begin on this thread."""

    def fail(self, where: str, error: BaseException) -> None:
        """End what one of the two failed to do, see `Guard.end`."""

    def stop(self) -> None:
        """Hear that a window has ended, before torch's own function."""


_listeners: dict[int, weakref.ref[Any]] = {}
_handlers: dict[int, weakref.ref[Any]] = {}
"""The handlers of those listeners that have one."""

_originals: tuple[Any, Any] | None = None
_ours: tuple[Any, Any] | None = None
"""What stands in the place of torch's functions."""


def can_listen() -> bool:
    """Whether this version of torch reports when a profiler starts."""
    return hasattr(_torch, WINDOW_STARTS) and hasattr(_torch, WINDOW_STOPS)


def listen(listener: Listener, handler: object | None = None) -> None:
    """Call `listener.start` and `.stop` around every window, until `stop_listening` or the listener dies.

    Args:
        handler: of a listener that writes what a profile recorded, what the profile's `on_trace_ready` calls,
            or is. A profile that calls other listeners' handlers does not start this one.
    """
    global _originals, _ours
    with _lock:
        key = id(listener)
        if handler is not None:
            _handlers[key] = weakref.ref(handler)
        gone = on_free(partial(_drop, key), log_for_debugging, "the end of a recorder")
        _listeners[key] = weakref.ref(listener, gone)
        if _originals is None:
            starts, stops = getattr(_torch, WINDOW_STARTS), getattr(_torch, WINDOW_STOPS)
            _ours = _notifying("start", starts), _notifying("stop", stops)
            _originals = starts, stops  # not before: without ours, a later listener begins anew
            setattr(_torch, WINDOW_STARTS, _ours[0])
            setattr(_torch, WINDOW_STOPS, _ours[1])


def stop_listening(listener: Listener) -> None:
    """Remove a listener. Safe to call twice."""
    _drop(id(listener))


def _drop(key: int) -> None:
    """Remove a listener. After the last alive torch gets its functions back, unless ours were replaced."""
    global _originals
    with _lock:
        _listeners.pop(key, None)
        _handlers.pop(key, None)
        for reference in _listeners.values():
            if reference() is not None:
                return
        present = getattr(_torch, WINDOW_STARTS), getattr(_torch, WINDOW_STOPS)
        if _originals is not None and present == _ours:
            setattr(_torch, WINDOW_STARTS, _originals[0])
            setattr(_torch, WINDOW_STOPS, _originals[1])
            _originals = None


def _notifying(method: Literal["start", "stop"], original: Callable[[], None]) -> Callable[[], None]:
    """Return a function that notifies all listeners, then calls torch's own."""

    def notify() -> Callable[[], None]:
        skipped: Collection[int] = ()
        if method == "start":
            raise_interrupt()
            skipped = _handlers.keys() - chosen if (chosen := _chosen()) else ()
        for key, reference in tuple(_listeners.items()):
            if key not in skipped and (listener := reference()) is not None:
                try:
                    getattr(listener, method)()
                except BaseException as error:
                    listener.fail(where, error)
        return original

    where = f"the {method} of a profiler"
    failed = _fail_all if method == "start" else _fail_all_and_go_on
    return entry(notify, failed, where, lambda: original, calls_after=0)


def _chosen() -> set[int]:
    """Return the listeners whose handlers the profile that begins a window may call; none if unknown."""
    frame = sys._getframe()
    while (below := frame.f_back) is not None and frame.f_code is not _START_TRACE:
        frame = below
    if frame.f_code is not _START_TRACE:
        return set()
    on_trace_ready = vars(frame.f_locals["self"]).get("on_trace_ready")
    handlers = ((reference(), key) for key, reference in tuple(_handlers.items()))
    return _reached(on_trace_ready, {id(handler): key for handler, key in handlers if handler is not None})


def _reached(called: object, keys_by_id: Mapping[int, int]) -> set[int]:
    """Return which objects a function may call: those that it holds, or that a variable holds.

    The variables are those that its code names. If too much had to be searched, the result is empty.

    Args:
        called: the function, or another callable.
        keys_by_id: values of the result by the `id` of the object.
    """
    reached, seen, waiting = set[int](), set[int](), [called]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or not _NOT_SEARCHED.isdisjoint(map(id, _bases_of(type(thing)))):
            continue
        seen.add(id(thing))
        if len(seen) > MOST_SEARCHED:
            return set()
        if id(thing) in keys_by_id:
            reached.add(keys_by_id[id(thing)])
        elif type(thing) is FunctionType:
            waiting += [each for each in gc.get_referents(thing) if each is not thing.__globals__]
            waiting += (dict.get(thing.__globals__, name) for name in _names_in(thing.__code__))
        else:
            waiting += gc.get_referents(thing)
    return reached


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the names of the global variables in a function's code, and of the attributes."""
    yield from code.co_names
    for constant in code.co_consts:
        if type(constant) is CodeType:
            yield from _names_in(constant)


MOST_SEARCHED = 1_000
_NOT_SEARCHED = frozenset(
    map(
        id,
        (type, ModuleType, torch.Tensor, torch.nn.Module, torch.optim.Optimizer, torch.profiler.profile),
    )
)
"""The classes of what a program's variables may hold that calls no handler, and has many objects."""
_bases_of = type.__dict__["__mro__"].__get__
_START_TRACE = getattr(getattr(torch.profiler.profile, "start_trace", None), "__code__", None)


def _fail_all(where: str, error: BaseException) -> None:
    call_all(*(partial(listener.fail, where, error) for listener in referents(list(_listeners.values()))))
    if not isinstance(error, Exception):
        raise error


_interrupts: list[BaseException] = []
"""What has ended the program while a window stopped, until it is raised."""


def _fail_all_and_go_on(where: str, error: BaseException) -> None:
    """Let torch stop the window first: if it is interrupted, it does so a second time, and crashes."""
    try:
        _fail_all(where, error)
    except BaseException as ending:
        _interrupts.append(ending)


def raise_interrupt() -> None:
    """Raise what has ended the program while a window stopped, in `on_trace_ready` or as the next begins."""
    if _interrupts:
        error = _interrupts.pop()
        _interrupts.clear()
        raise error
