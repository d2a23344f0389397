"""Threads of ours, beside those of the program."""

from __future__ import annotations

import threading
from collections.abc import Callable

_LONGEST_START_SECONDS = 1.0


class _Started(threading.Event):
    def wait(self, timeout: float | None = None) -> bool:
        return super().wait(_LONGEST_START_SECONDS if timeout is None else timeout)


class DaemonThread(threading.Thread):
    """A thread that does not keep the process from ending, nor its starter from going on.

    `Thread.start` waits for the thread, and where it begins without memory for its first call, for ever
    (python/cpython#140746).
    """

    def __init__(self, run: Callable[[], object], name: str) -> None:
        super().__init__(target=run, name=name, daemon=True)
        vars(self)["_started"] = _Started()

    def start(self) -> None:
        """Start the thread.

        Raises:
            RuntimeError: it has not begun. It may begin later.
        """
        super().start()
        if self.ident is None:
            raise RuntimeError("can't start new thread: it has not begun")
