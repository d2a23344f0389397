"""Hear of every window of torch.profiler: one patch of torch for all who listen, gone with the last of them.

torch calls `_run_on_profiler_start` just before each window and `_run_on_profiler_stop` just after it
(torch/autograd/profiler.py, torch 2.6 to 2.13). Patching these costs nothing while no profiler runs.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Protocol

from torch.autograd import profiler as _profiler_module

_torch: Any = _profiler_module
_START, _STOP = "_run_on_profiler_start", "_run_on_profiler_stop"
_lock = threading.RLock()


class Listener(Protocol):
    """Who hears of windows. Neither method may raise."""

    def start(self) -> None:
        """Hear that a window is about to begin on this thread."""

    def stop(self) -> None:
        """Hear that a window has ended."""


_listeners: weakref.WeakSet[Any] = weakref.WeakSet()
_originals: tuple[Any, Any] | None = None


def can_listen() -> bool:
    """Whether this version of torch reports when a profiler starts."""
    return hasattr(_torch, _START) and hasattr(_torch, _STOP)


def listen(listener: Listener) -> None:
    """Call `listener.start` and `.stop` around every window, until `stop_listening` or the listener dies."""
    global _originals
    with _lock:
        _listeners.add(listener)
        weakref.finalize(listener, _restore).atexit = False
        if _originals is None:
            _originals = getattr(_torch, _START), getattr(_torch, _STOP)
            setattr(_torch, _START, _started)
            setattr(_torch, _STOP, _stopped)


def stop_listening(listener: Listener) -> None:
    """Remove a listener. Safe to call twice."""
    with _lock:
        _listeners.discard(listener)
        _restore()


def _restore() -> None:
    """Give torch its functions back if nobody listens and no other code has replaced ours."""
    global _originals
    with _lock:
        ours = getattr(_torch, _START), getattr(_torch, _STOP)
        if not list(_listeners) and _originals is not None and ours == (_started, _stopped):
            setattr(_torch, _START, _originals[0])
            setattr(_torch, _STOP, _originals[1])
            _originals = None


def _started() -> None:
    originals = _originals
    for listener in list(_listeners):
        listener.start()
    if originals is not None:
        originals[0]()


def _stopped() -> None:
    if _originals is not None:
        _originals[1]()
    for listener in list(_listeners):
        listener.stop()
