"""One estimate at a time: what two threads patch and put back in turns would stay patched."""

from __future__ import annotations

import sys
import threading
from types import FrameType

from tb_memplugin.errors import MemPluginError

PATIENCE = 10.0
"""Seconds for which the thread whose turn it is may wait for something, before it is taken to wait for us."""

_LOOK = 0.05
"""Seconds between two looks at that thread."""

_WAITS = ("threading.py", "queue.py", "_base.py", "synchronize.py")
"""Files of the standard library in which a thread waits for another: joins, events, queues, futures."""


class Turns:
    """A lock that may be nested within a thread, and that says so where waiting for it would never end."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner = 0
        self._depth = 0

    def acquire(self) -> None:
        """Wait for this thread's turn.

        Raises:
            MemPluginError: the thread whose turn it is waits for this one, or has waited for `PATIENCE`
                seconds for another thread.
        """
        stuck = _Stuck()
        while not self._lock.acquire(timeout=_LOOK):
            owner = self._owner
            if stuck.is_stuck(sys._current_frames().get(owner)):
                raise MemPluginError(
                    f"Another thread is inside of an estimate ({_name(owner)}), and waits for this one: "
                    "only one at a time can run.",
                    where=f"MemoryEstimator in {threading.current_thread().name}",
                    fix="Estimate on the thread that is in the block already (blocks may nest there), or end "
                    "that block before this thread begins.",
                )
        self._owner = threading.get_ident()
        self._depth += 1

    def release(self) -> None:
        """End this thread's turn, as often as it was acquired."""
        self._depth -= 1
        self._owner = self._owner if self._depth else 0
        self._lock.release()


class _Stuck:
    """Looks again and again whether a thread stands where it waits for another."""

    def __init__(self) -> None:
        self._at: tuple[int, int] | None = None
        self._looks = 0

    def is_stuck(self, frame: FrameType | None) -> bool:
        if frame is None or not frame.f_code.co_filename.endswith(_WAITS):
            self._at = None
            return False
        at = (id(frame), frame.f_lasti)
        self._looks = self._looks + 1 if at == self._at else 0
        self._at = at
        return _joins_us(frame) or self._looks * _LOOK >= PATIENCE


def _joins_us(frame: FrameType | None) -> bool:
    """Whether a thread is in `Thread.join` of the thread that asks."""
    me = threading.current_thread()
    while frame is not None and frame.f_code.co_filename.endswith(_WAITS):
        if frame.f_code.co_name == "join" and frame.f_locals.get("self") is me:
            return True
        frame = frame.f_back
    return False


def _name(ident: int) -> str:
    return next((one.name for one in threading.enumerate() if one.ident == ident), "one that ended")
