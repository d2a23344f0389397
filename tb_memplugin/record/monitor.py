"""`MemoryMonitor`: figures of every step of a whole training, streamed to the tab while it runs."""

from __future__ import annotations

import operator
import os
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from types import TracebackType
from typing import Any

import torch

from tb_memplugin.errors import MemPluginError
from tb_memplugin.logs import instance_logger, say_where
from tb_memplugin.record.arguments import default_worker_name
from tb_memplugin.record.guard import Ending, Guard, call_all, ends_program, guarded
from tb_memplugin.record.steps.counters import counters_of
from tb_memplugin.record.steps.recording import (
    Allowance,
    DeviceStep,
    MonitoredStep,
    OpenPhase,
    PhaseStep,
    StepRecording,
    figures_of,
)
from tb_memplugin.record.trackers import LogTo, TrackerLog, chosen
from tb_memplugin.store.disk_sync import refusal
from tb_memplugin.store.files import absolute, is_remote
from tb_memplugin.store.growing_file import UnsettledError
from tb_memplugin.store.writer import StepsWriter
from tb_memplugin.threads import DaemonThread
from tb_memplugin.trace.notes import STEPS_JOINED, Note

__all__ = ["DeviceStep", "MemoryMonitor", "MonitoredStep", "PhaseStep"]

LOCAL_SECONDS, REMOTE_SECONDS = 10.0, 60.0
"""Seconds between two records. On a remote file system each record is a file of its own."""

MOST_AT_ONCE = 50_000
"""The largest number of steps in one record."""

HIGHEST_STEP = 2**53
"""Step numbers are below this: JavaScript represents integers exactly only up to here."""


MOST_FAILURES = 3
"""After so many steps in a row in which something failed, the monitor stops."""

_LOST = "A step is without figures of its memory"
_LONGEST_WAIT_S = 5.0
_STEP, _FLUSH, _CLOSE = "MemoryMonitor.step", "MemoryMonitor.flush", "MemoryMonitor.close"
_JOINED = (
    "Steps are too short to read each one's figures at the cost that was allowed. Figures are of all steps "
    "since the figures before: their highest peak, and all of their allocations and time. The last ones may "
    "include what ran after the last step."
)
_NOT_WRITTEN = "Figures of steps could not be written yet"
_TRIED_AGAIN = (
    "They are tried again until the program ends; what is not taken by then is lost, as is each window that "
    "is refused meanwhile. The training continues."
)


class MemoryMonitor:
    """Watches a whole training: peak, reserve, fragmentation and time of every step and named phase.

    It reads counters that the allocator keeps in any case, which takes some microseconds per step, and
    writes them from its own thread. torch keeps no such counters for the CPU; there the monitor reads the
    resident memory of the process. A failure of the monitor never ends the training: the step in which it
    happens has no figures, and that is logged once; after three such steps in a row the monitor stops. Copies
    of a monitor are that monitor; an unpickled one is new, with the same arguments.

    Args:
        logdir: a folder for TensorBoard, as for `memory_trace_handler`: a local path or an fsspec URL.
        worker_name: as for `memory_trace_handler`. If both have the same name, the tab shows them together.
        device: one or several devices to watch; "cpu" and "process" mean the memory of the process.
            None: the current accelerator of this process, or the process where there is none.
        reset_peaks: reset the allocator's peak counters, or Linux's peak of the process, at each step and
            phase, so that the peak of a step is exact. `torch.cuda.max_memory_allocated`,
            `resource.getrusage` and the like still return correct values; docs/monitor.md says who does
            not. If False, nothing is reset, and peaks below the highest so far are lower bounds.
        flush_seconds: the longest time before a step is written for the tab. None: 10, or 60 on a remote
            file system.
        log_level: the level for this monitor's own messages, as a name or number. None uses the package's
            level.
        log_to: "wandb", "mlflow" or "trackio", or several: its run, which the program has begun, gets
            the peaks of each step, on the thread that calls `step` (docs/trackers.md says what that takes).
        max_overhead: the share of the time that `step` may take, such as 0.01. If steps are too short for
            that, after the first ten, figures are of several steps together: their highest peak, and all
            that happened in them. None: every step has its own.
        durable: whether `flush` and `close` wait until the disk has the figures (docs/design/store.md).

    Raises:
        TypeError: `logdir` is not a path, `worker_name` is not text, or `flush_seconds` or `max_overhead` is
            not a number.
        MemPluginError: the device, the level or the tracker does not exist, the tracker is not installed, or
            a number is not above 0.

    Example:
        >>> with MemoryMonitor("runs/a") as monitor:
        ...     for batch in batches:
        ...         with monitor.phase("forward"):
        ...             loss = model(batch)
        ...         with monitor.phase("backward"):
        ...             loss.backward()
        ...         optimizer.step()
        ...         monitor.step()
    """

    def __init__(
        self,
        logdir: str | os.PathLike[str],
        worker_name: str | None = None,
        device: str | torch.device | Sequence[str | torch.device] | None = None,
        reset_peaks: bool = True,
        flush_seconds: float | None = None,
        log_level: int | str | None = None,
        log_to: LogTo = None,
        max_overhead: float | None = None,
        durable: bool = False,
    ) -> None:
        folder = absolute(os.fspath(logdir))
        if worker_name is not None and not isinstance(worker_name, str):
            raise TypeError(f"worker_name is a {type(worker_name).__name__}; give text")
        seconds = REMOTE_SECONDS if is_remote(folder) else LOCAL_SECONDS
        if flush_seconds is not None:
            seconds = min(_positive(flush_seconds, "flush_seconds"), threading.TIMEOUT_MAX)
        share = None if max_overhead is None else _positive(max_overhead, "max_overhead")
        self._arguments = (
            logdir,
            worker_name,
            device,
            reset_peaks,
            flush_seconds,
            log_level,
            log_to,
            max_overhead,
            durable,
        )
        self._logger = instance_logger(log_level)
        self._guard = Guard(_LOST, self._logger)
        self._trackers = TrackerLog(chosen(log_to), self._guard)
        self._pid = os.getpid()
        self._closed = self._is_lost = False
        self._failures = 0
        self._allowance = Allowance(share)
        self._recording = StepRecording(counters_of(device, reset_peaks=reset_peaks))
        self._stream = _Stream(folder, worker_name, self._recording, seconds, self._guard, durable=durable)
        self._end = Ending(self, self._stream.close, self._stream.fail_at_end, _CLOSE)
        self._begin()

    def __copy__(self) -> MemoryMonitor:
        return self

    def __deepcopy__(self, _: object) -> MemoryMonitor:
        """Return the monitor itself: two would reset each other's peaks."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return MemoryMonitor, self._arguments

    @guarded("MemoryMonitor.phase", nullcontext)
    def phase(self, name: str) -> AbstractContextManager[None]:
        """Return a context manager that measures its block under a name: `forward`, `validation`, any text.

        Phases may nest and repeat. If a name repeats within a step, its runs and times are summed and its
        highest peak counts. After 32 different names, further ones are merged into `(other phases)`.
        """
        return PhaseBlock(name, self)

    @guarded(_STEP)
    def step(self, number: int | None = None) -> MonitoredStep | None:
        """End a training step and return its figures, or None: nothing could be read, or not at that cost.

        Args:
            number: the number of the step, above that of the last step. None: one more than the last step,
                starting at 0.
        """
        if not self._works():
            return None
        if self._is_lost:
            self._recording.skip_step()
            self._is_lost = False
            return None
        if not self._allowance.is_due():
            self._recording.join_step()
            self._stream.joins = True
            return None
        begin_ns = time.perf_counter_ns()
        step = self._recording.end_step(self._checked(number))
        self._failures = 0
        self._stream.stepped()
        if step is not None:
            self._trackers.step(step)
        self._allowance.spent(time.perf_counter_ns() - begin_ns)
        return step

    def _checked(self, number: Any) -> int | None:
        """Return the given number, or None if it is not above the last step's, with one warning.

        With None, the next step gets the number after the last one.
        """
        if number is None:
            return None
        last = self._recording.last
        step = operator.index(number) if hasattr(number, "__index__") else -1
        if (last.step if last is not None else -1) < step < HIGHEST_STEP:
            return step
        self._guard.warn(
            f"Step {number!r:.80} does not follow the step before it, so steps are numbered on from "
            "there. This is logged once.",
            once="number",
        )
        return None

    @property
    def last_step(self) -> MonitoredStep | None:
        """The figures of the step that ended last, for use in other loggers."""
        return self._recording.last

    @guarded(_FLUSH)
    def flush(self) -> None:
        """Write the steps that are not written yet; the tab shows them when TensorBoard reloads."""
        if self._works():
            self._stream.write()

    @guarded(_CLOSE)
    def close(self) -> None:
        """Write the remaining steps and stop. Safe to call twice.

        Work after the last step is counted only where figures of several steps are together.
        """
        self._closed = True
        self._end()
        self._trackers.flush()

    def __enter__(self) -> MemoryMonitor:
        self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    @guarded("the beginning of MemoryMonitor")
    def _begin(self) -> None:
        if self._works():
            self._recording.begin()

    def _works(self) -> bool:
        """Whether the monitor is active in this process; in a forked child it is not."""
        return not self._closed and self._failures < MOST_FAILURES and self._pid == os.getpid()

    def fail(self, where: str, error: BaseException) -> None:
        """Lose the running step, because of an error."""
        if where == _CLOSE:
            self._stream.fail_at_end(where, error)
            return
        if where == _FLUSH:
            self._guard.end(where, error, loss=_NOT_WRITTEN)
            return
        is_ours = not ends_program(error)
        begins = where == _STEP or not is_ours  # then the next step begins here
        if is_ours and (begins or not self._is_lost):
            self._failures += 1
        self._is_lost = not begins
        self._guard.end(where, error, *([self._recording.skip_step] if begins else []))

    def begin_phase(self, name: str) -> OpenPhase | None:
        """Begin a phase; return None if nothing is measured."""
        return self._recording.begin_phase(name) if self._works() and not self._is_lost else None

    def end_phase(self, phase: OpenPhase) -> None:
        """End a phase."""
        if self._works() and not self._is_lost:
            self._recording.end_phase(phase)


class PhaseBlock:
    """The context manager that `MemoryMonitor.phase` returns. A phase that never ends is dropped."""

    __slots__ = ("_monitor", "_name", "_open")

    def __init__(self, name: str, monitor: MemoryMonitor) -> None:
        self._name, self._monitor = name, monitor
        self._open: list[OpenPhase | None] = []

    @guarded("the beginning of a phase")
    def __enter__(self) -> None:
        self._open.append(None)
        self._open[-1] = self._monitor.begin_phase(self._name)

    @guarded("the end of a phase")
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        phase = self._open.pop() if self._open else None
        if phase is not None:
            self._monitor.end_phase(phase)

    def fail(self, where: str, error: BaseException) -> None:
        """Lose the running step, because of an error."""
        self._monitor.fail(where, error)


def _positive(number: float, name: str) -> float:
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise TypeError(f"{name} is a {type(number).__name__}; give a number")
    if not number > 0:
        raise MemPluginError(
            f"{name} is {number}.", where="MemoryMonitor", fix="Give a number above 0, or leave it out."
        )
    return float(number)


class _Stream:
    """Writes recorded steps from a thread that starts with the first step, without holding the monitor."""

    def __init__(
        self,
        logdir: str,
        worker: str | None,
        recording: StepRecording,
        seconds: float,
        guard: Guard,
        *,
        durable: bool,
    ) -> None:
        self._guard, self._durable = guard, durable
        self._logdir, self._worker, self._recording, self._seconds = logdir, worker, recording, seconds
        self._pid = os.getpid()
        self._epoch_ns = time.time_ns()
        self._writer: StepsWriter | None = None
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._not_before = 0.0
        self._is_announced = False
        self.joins = False

    def stepped(self) -> None:
        """Start the writing thread when the first step has ended, and again if it has failed.

        Where no thread can be started, this one writes as often, and then tries again.
        """
        if (self._thread is not None and self._thread.is_alive()) or time.monotonic() < self._not_before:
            return
        self._worker = self._worker or default_worker_name()
        thread = DaemonThread(self._run, "tb_memplugin monitor")
        try:
            thread.start()
        except (RuntimeError, MemoryError):
            self._not_before = time.monotonic() + self._seconds
            self.write()
        else:
            self._thread = thread

    def close(self) -> None:
        """Write the remaining steps and stop reading the counters. Does nothing in a forked child."""
        if self._pid != os.getpid():
            return
        call_all(self._recording.end_joined)
        self._ending.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        if self._recording.waiting():  # the thread failed
            self.write(even_unused=True)
        call_all(self._recording.close, *([self._writer.close] if self._writer is not None else []))

    def fail_at_end(self, where: str, error: BaseException) -> None:
        """Let the thread end. It may write until then."""
        loss = "The last figures of steps may not be written"
        self._guard.end(where, error, self._abandon, loss=loss)

    def _abandon(self) -> None:
        self._ending.set()
        if self._thread is not None:
            self._thread.join(_LONGEST_WAIT_S)

    def fail(self, where: str, error: BaseException) -> None:
        """Log what failed on the thread. What it should have written is written later."""
        if isinstance(error, Exception):
            self._guard.end(where, error, loss="Figures of steps were not written in time")

    @guarded("the thread of MemoryMonitor")
    def _run(self) -> None:
        self._ending.wait(min(1.0, self._seconds))  # so that the first steps appear early
        self.write()
        while not self._ending.wait(self._seconds):
            self.write()
        self.write(even_unused=True)

    def write(self, *, even_unused: bool = False) -> None:
        """Write the steps that ended since the last write; keep those that cannot be written for later."""
        with self._lock:
            if not even_unused and not all(counter.in_use for counter in self._recording.counters):
                return  # the names of unused devices are not known yet
            part: list[MonitoredStep] = []
            try:
                if self._writer is not None:
                    self._writer.settle()
                steps = self._recording.waiting()
                for begin in range(0, len(steps), MOST_AT_ONCE):
                    part = steps[begin : begin + MOST_AT_ONCE]
                    self._write(part)
                    self._recording.forget(part)
                    if not self._is_announced:
                        self._is_announced = True
                        with suppress(Exception):
                            say_where(self._logdir, "figures of steps", self._guard.logger)
            except BaseException as error:
                if isinstance(error, UnsettledError):
                    self._recording.forget(part)  # the writer keeps it
                self._refuse(error)

    def _write(self, rows: Sequence[MonitoredStep]) -> None:
        if self._writer is None:
            worker = self._worker or default_worker_name()
            self._writer = StepsWriter(
                self._logdir, worker, self._epoch_ns, torch.__version__, self._refuse, durable=self._durable
            )
        dropped = self._recording.dropped
        text = f"{dropped:,} steps could not be written and are missing."
        notes = [Note(text, "steps_missing", level="warning")] if dropped else []
        if self.joins:
            notes.append(Note(_JOINED, STEPS_JOINED))
        self._writer.write(figures_of(rows, self._recording.counters, notes))

    def _refuse(self, error: BaseException) -> None:
        if isinstance(error, OSError):
            why = f"Figures of steps could not be written: {error.strerror or error}. {_TRIED_AGAIN}"
            error = refusal(self._logdir, error, why)
        self._guard.end(self._logdir, error, loss=_NOT_WRITTEN)
