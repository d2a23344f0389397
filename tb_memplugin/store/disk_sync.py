"""Flushes what was written to the disk (`fsync`), so that it outlives a crash of the whole machine.

That takes some milliseconds, or seconds while a disk is busy. So no training waits for it: a thread of its
own does it, which ends when nothing is left to flush.
"""

from __future__ import annotations

import atexit
import math
import os
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from tb_memplugin.errors import MemPluginError, UndeletedError, UnflushedError, fix_of
from tb_memplugin.store import files
from tb_memplugin.threads import DaemonThread

THREAD = "tb_memplugin disk"
"""The name of the thread."""

LONGEST_WAIT_SECONDS = 5.0
"""How long the end of a recording or of the process waits for the disk."""


class DiskSync:
    """Flushes the files of one writer, in the order in which they were added. After a fork, it starts anew.

    Args:
        logdir: where errors say that they were.
        failed: called with what was raised by a flush or by `idle`, on the thread. It raises nothing.
        pause: seconds between the end of a flush and the begin of the next one. What is added before that is
            flushed with what is added later, or at the end of the process.
        idle: called once, on the thread, when the first files are flushed.
        durable: whether `add` waits until the disk has the files, and so nothing waits for the pause.
    """

    def __init__(
        self,
        logdir: str,
        failed: Callable[[Exception], object],
        pause: float = 0.0,
        idle: Callable[[], object] = lambda: None,
        *,
        durable: bool = False,
    ) -> None:
        self._logdir, self.failed, self._idle = logdir, failed, idle
        self._pause, self._durable = 0.0 if durable else pause, durable
        self._forget()
        _open.add(self)

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._waiting: dict[str, None] = {}
        self._named: set[str] = set()
        self._flushed: set[str] = set()
        self._is_running = False
        self._not_before = 0.0

    def add(self, *paths: str, begin: float = -math.inf) -> None:
        """Flush files soon, and the folders that contain their names, if they are local.

        Args:
            begin: when the write began that is known to have succeeded (`time.perf_counter`): a fault of
                before has ended.
        """
        if self._pid != os.getpid():
            self._forget()
        with self._changed:
            for key, fault in list(_faults.items()):
                if key[0] == self._logdir and fault.seconds < begin:
                    _faults.pop(key, None)
            for path in paths:
                self._waiting.pop(path, None)
                if not files.is_remote(path):
                    self._waiting[path] = None
        if time.monotonic() >= self._not_before:
            self.start()
        if self._durable:
            self.wait(None)

    def start(self) -> None:
        """Flush now what waits for the end of the pause."""
        with self._changed:
            if self._is_running or not self._waiting or self._pid != os.getpid():
                return
            self._is_running = True
        try:
            in_background(self._run)
        except (RuntimeError, MemoryError):  # no thread can be started, as at the end of the interpreter
            self._run()
        except BaseException:
            with self._changed:
                self._is_running = False
            raise

    def wait(self, seconds: float | None = LONGEST_WAIT_SECONDS) -> None:
        """Wait until all is flushed, so many seconds at the most. Returns at once in a forked child."""
        if self._pid == os.getpid():
            with self._changed:
                self._changed.wait_for(lambda: not self._is_running, seconds)

    def _run(self) -> None:
        try:
            while paths := self._take():
                self._flush(paths)
        except BaseException as error:  # noqa: BLE001  # there is nobody above: this is a thread
            with self._changed:
                self._is_running = False
                self._changed.notify_all()
            if isinstance(error, Exception):
                self.failed(error)

    def _take(self) -> list[str]:
        with self._changed:
            paths, self._waiting = list(self._waiting), {}
            self._is_running = bool(paths)
            self._changed.notify_all()
        return paths

    def _flush(self, paths: list[str]) -> None:
        for path in paths:
            try:
                self._flush_file(path)
            except OSError as error:
                self.failed(_not_flushed(self._logdir, error))
        for left in files.left_below(self._logdir):
            self.failed(_not_deleted(self._logdir, left))
        self._not_before = time.monotonic() + self._pause
        idle, self._idle = self._idle, lambda: None
        idle()

    def _flush_file(self, path: str) -> None:
        """Flush a file; the first time also its folder, and those above it that were not flushed before."""
        files.flush_path(path)
        if path in self._named:
            return
        folder, *above = files.folders_above(path)
        for parent in (folder, *(each for each in above if each not in self._flushed)):
            files.flush_path(parent)
            self._flushed.add(parent)
        self._named.add(path)


@dataclass(frozen=True)
class _Fault:
    """The kind of error as which a fault is told, and when it was first met."""

    kind: type[MemPluginError]
    seconds: float


_faults: dict[tuple[str, int | None], _Fault] = {}
"""By logdir and errno, until something is written there."""


def refusal(
    logdir: str,
    error: OSError,
    what: str,
    kind: type[MemPluginError] = MemPluginError,
    fix: str = "Choose a folder that this process can write to.",
) -> MemPluginError:
    """Return a failure in a logdir as an error of ours, of the kind with which its fault began.

    Guards log each kind once for an errno and a place. So a fault that lasts is logged once, whatever it
    stops, and a failure of another kind is logged after something was written.
    """
    fault = _faults.setdefault((logdir, error.errno), _Fault(kind, time.perf_counter()))
    result = fault.kind(what, where=logdir, fix=fix_of(error, fix))
    result.__cause__ = error
    return result


def _not_flushed(logdir: str, error: OSError) -> MemPluginError:
    """Return what a failed flush costs, and what the same fault may cost next."""
    what = (
        f"What was recorded could not be flushed to the disk: {error.strerror or error}. It may not outlive "
        "a crash of this machine, and what follows may not be written."
    )
    return refusal(logdir, error, what, UnflushedError, "Choose a folder on another disk.")


def _not_deleted(logdir: str, error: OSError) -> MemPluginError:
    what = (
        f"Temporary files could not be deleted: {error.strerror or error}. What is recorded is complete. "
        "They are deleted before a later window is written, or by the next writer in this folder."
    )
    fix = "Choose a folder in which this process can delete files."
    return refusal(logdir, error, what, UndeletedError, fix)


def in_background(run: Callable[[], object]) -> None:
    """Call a function on a thread that does not keep the process from ending."""
    DaemonThread(run, THREAD).start()


_open: weakref.WeakSet[DiskSync] = weakref.WeakSet()


@atexit.register
def _end() -> None:
    """Flush what waits, and wait for it."""
    until = time.monotonic() + LONGEST_WAIT_SECONDS
    for end in (DiskSync.start, lambda sync: sync.wait(max(until - time.monotonic(), 0.0))):
        for sync in list(_open):
            try:
                end(sync)
            except Exception as error:  # noqa: BLE001  # there is nobody above
                sync.failed(error)
