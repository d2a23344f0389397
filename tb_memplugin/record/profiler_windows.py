"""Hear of every window of torch.profiler: one patch of torch for all who listen, gone with the last of them.

torch calls a function just before each window, and another just after it (torch/autograd/profiler.py, torch
2.6 to 2.13). Patching these costs nothing while no profiler runs.
"""

from __future__ import annotations

import threading
import weakref
from functools import partial
from typing import Any, Literal, Protocol

from torch.autograd import profiler as _profiler_module

from tb_memplugin.record.guard import Guard, call_all
from tb_memplugin.record.torch_private.profiler import WINDOW_STARTS, WINDOW_STOPS

_torch: Any = _profiler_module
_lock = threading.RLock()
_guard = Guard("The memory of this window may not be recorded")


class Listener(Protocol):
    """Who hears of windows."""

    def start(self) -> None:
        """Hear that a window is about to begin on this thread."""

    def stop(self) -> None:
        """Hear that a window has ended."""


_listeners: weakref.WeakSet[Any] = weakref.WeakSet()
_originals: tuple[Any, Any] | None = None


def can_listen() -> bool:
    """Whether this version of torch reports when a profiler starts."""
    return hasattr(_torch, WINDOW_STARTS) and hasattr(_torch, WINDOW_STOPS)


def listen(listener: Listener) -> None:
    """Call `listener.start` and `.stop` around every window, until `stop_listening` or the listener dies."""
    global _originals
    with _lock:
        _listeners.add(listener)
        weakref.finalize(listener, _restore).atexit = False
        if _originals is None:
            _originals = getattr(_torch, WINDOW_STARTS), getattr(_torch, WINDOW_STOPS)
            setattr(_torch, WINDOW_STARTS, _started)
            setattr(_torch, WINDOW_STOPS, _stopped)


def stop_listening(listener: Listener) -> None:
    """Remove a listener. Safe to call twice."""
    with _lock:
        _listeners.discard(listener)
        _restore()


def _restore() -> None:
    """Give torch its functions back if nobody listens and no other code has replaced ours."""
    global _originals
    with _lock:
        ours = getattr(_torch, WINDOW_STARTS), getattr(_torch, WINDOW_STOPS)
        if not list(_listeners) and _originals is not None and ours == (_started, _stopped):
            setattr(_torch, WINDOW_STARTS, _originals[0])
            setattr(_torch, WINDOW_STOPS, _originals[1])
            _originals = None


def _started() -> None:
    originals = _originals
    call_all(*(partial(_call, listener, "start") for listener in list(_listeners)))
    if originals is not None:
        originals[0]()


def _stopped() -> None:
    if _originals is not None:
        _originals[1]()
    call_all(*(partial(_call, listener, "stop") for listener in list(_listeners)))


def _call(listener: Listener, method: Literal["start", "stop"]) -> None:
    try:
        getattr(listener, method)()
    except BaseException as error:
        _guard.end(f"the {method} of a profiler", error)
