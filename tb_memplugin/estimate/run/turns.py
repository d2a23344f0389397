"""Allow one estimate at a time: if two threads patched torch and restored it in turns, patches would stay."""

from __future__ import annotations

import sys
import threading
from types import FrameType

from tb_memplugin.errors import MemPluginError

PATIENCE = 10.0
"""Seconds that the lock's owner may wait at one place before it is assumed to wait for this thread."""

_LOOK = 0.05
"""Seconds between two looks at the owner of the lock."""

_WAITS = ("threading.py", "queue.py", "_base.py", "synchronize.py")
"""Standard-library files whose functions wait for another thread: joins, events, queues, futures."""


class Turns:
    """A reentrant lock that raises where waiting for it would never end."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner = 0
        self._depth = 0

    def acquire(self) -> None:
        """Wait for the lock.

        Raises:
            MemPluginError: the owner of the lock joins this thread, or has waited for another thread for
                `PATIENCE` seconds.
        """
        stuck = _Stuck()
        while not self._lock.acquire(timeout=_LOOK):
            owner = self._owner
            if stuck.is_stuck(sys._current_frames().get(owner)):
                raise MemPluginError(
                    f"Another thread is inside an estimate ({_name(owner)}) and waits for this one. "
                    "Only one estimate can run at a time.",
                    where=f"MemoryEstimator in {threading.current_thread().name}",
                    fix=(
                        "Estimate on the thread that is already in the block (blocks may nest there), or "
                        "end that block before this thread starts its own."
                    ),
                )
        self._owner = threading.get_ident()
        self._depth += 1

    def release(self) -> None:
        """Release the lock, once for each `acquire`."""
        self._depth -= 1
        self._owner = self._owner if self._depth else 0
        self._lock.release()


class _Stuck:
    """Decides from repeated looks at a thread's frame whether it is stuck waiting for another thread."""

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
    """Whether the thread with this frame is joining the calling thread."""
    me = threading.current_thread()
    while frame is not None and frame.f_code.co_filename.endswith(_WAITS):
        if frame.f_code.co_name == "join" and frame.f_locals.get("self") is me:
            return True
        frame = frame.f_back
    return False


def _name(ident: int) -> str:
    return next((thread.name for thread in threading.enumerate() if thread.ident == ident), "one that ended")
