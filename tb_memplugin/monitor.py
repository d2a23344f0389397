"""`MemoryMonitor`: figures of every step of a whole training, streamed to the tab while it runs."""

from __future__ import annotations

import logging
import operator
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch

from tb_memplugin.errors import MemPluginError
from tb_memplugin.handler import default_worker_name
from tb_memplugin.logs import instance_logger
from tb_memplugin.sources.steps.columns import figures_of
from tb_memplugin.sources.steps.devices import counters_of
from tb_memplugin.sources.steps.recording import (
    DeviceStep,
    MonitoredStep,
    OpenPhase,
    PhaseStep,
    StepRecording,
)
from tb_memplugin.store.files import absolute, is_remote
from tb_memplugin.store.steps_writer import StepsWriter

__all__ = ["DeviceStep", "MemoryMonitor", "MonitoredStep", "PhaseStep"]

LOCAL_SECONDS, REMOTE_SECONDS = 10.0, 60.0
"""Between two records. On a remote file system each is a file of its own."""

MOST_AT_ONCE = 50_000
"""Steps in one record."""

HIGHEST_STEP = 2**53
"""Below it are the numbers of steps: browsers count exactly up to there."""


class MemoryMonitor:
    """Watches a whole training: peak, reserve, fragmentation and time of every step and named phase.

    It reads counters that the allocator keeps anyway, some microseconds a step, and a thread of its own
    writes them. On the CPU torch counts nothing: there it is the resident memory of the process. Nothing
    that fails here ends the training.

    Args:
        logdir: a folder for TensorBoard, as for `memory_trace_handler`: a local path or an fsspec URL.
        worker_name: as for `memory_trace_handler`; give both the same, and the tab shows both together.
        device: one or several to watch; "cpu" and "process" mean the memory of the process. None: this
            process's current accelerator, else the process.
        reset_peaks: the peak of a step is exact because the allocator's peak counters are reset with each
            step and phase. What `torch.cuda.max_memory_allocated` and the like tell stays right: see
            docs/monitor.md. False: nothing is reset, and peaks below the highest ever are lower bounds.
        flush_seconds: the longest that a step waits for the tab. None: 10, on a remote file system 60.
        log_level: of this monitor's own messages, as a name or number. None: as the package's.

    Raises:
        TypeError: `worker_name` is no text, or `flush_seconds` no number.
        MemPluginError: there is no such device here, or no such level, or `flush_seconds` is not above 0.

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
    ) -> None:
        folder = absolute(os.fspath(logdir))
        if worker_name is not None and not isinstance(worker_name, str):
            raise TypeError(f"worker_name is a {type(worker_name).__name__}; give text")
        seconds = REMOTE_SECONDS if is_remote(folder) else LOCAL_SECONDS
        if flush_seconds is not None:
            seconds = _seconds(flush_seconds)
        self._logger = instance_logger(log_level)
        self._pid = os.getpid()
        self._broken = self._closed = False
        self._recording = StepRecording(counters_of(device, reset_peaks=reset_peaks))
        self._stream = _Stream(folder, worker_name, self._recording, seconds, self._logger)
        self._end = weakref.finalize(self, self._stream.close)  # at the end of the process, too
        self._begin()

    def phase(self, name: str) -> PhaseBlock:
        """A block with a name of your own: `forward`, `validation`, anything. Phases may nest and repeat.

        Of a name that repeats within a step, runs and times add up, and the peak is the highest. Past 32
        names the others are one, `(other phases)`.
        """
        return PhaseBlock(name, self._begin_phase, self._end_phase)

    def step(self, number: int | None = None) -> MonitoredStep | None:
        """A training step has ended; gives its figures, None where nothing could be read.

        Args:
            number: the step's, above the last one's. None: one more than the last, from 0.
        """
        if not self._works():
            return None
        try:
            step = self._recording.end_step(self._checked(number))
            self._stream.stepped()
        except Exception as error:  # noqa: BLE001  # the training goes on, whatever happens to us
            self._give_up(error)
            return None
        return step

    def _checked(self, number: Any) -> int | None:
        """The number given; None where it follows no step: then they are counted on, which is told once."""
        if number is None:
            return None
        last = self._recording.last
        whole = operator.index(number) if hasattr(number, "__index__") else -1
        if (last.step if last is not None else -1) < whole < HIGHEST_STEP:
            return whole
        self._stream.warn(
            f"Step {number!r:.80} does not follow the one before: steps are counted on. This is told once.",
            once="number",
        )
        return None

    @property
    def last_step(self) -> MonitoredStep | None:
        """The figures of the step that ended last, for a logger of your own."""
        return self._recording.last

    def flush(self) -> None:
        """Write what was not written yet; the tab shows it when TensorBoard reloads."""
        if self._works():
            self._stream.write()

    def close(self) -> None:
        """Write the rest and end. What runs after the last step is in no step. May be called again."""
        self._closed = True
        self._end()

    def __enter__(self) -> MemoryMonitor:
        self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self) -> None:
        if not self._works():
            return
        try:
            self._recording.begin()
        except Exception as error:  # noqa: BLE001  # the training goes on
            self._give_up(error)

    def _works(self) -> bool:
        """Not in a process that forked from ours: the figures are of ours."""
        return not self._closed and not self._broken and self._pid == os.getpid()

    def _give_up(self, error: Exception) -> None:
        self._broken = True
        self._logger.debug("monitoring failed", exc_info=error)
        self._stream.warn(
            f"Memory is monitored no longer ({type(error).__name__}: {error}). The training goes on.\n"
            "  fix: set the logger tb_memplugin to DEBUG for the traceback, and report it with that."
        )

    def _begin_phase(self, name: str) -> OpenPhase | None:
        if not self._works():
            return None
        try:
            return self._recording.begin_phase(name)
        except Exception as error:  # noqa: BLE001  # the training goes on
            self._give_up(error)
            return None

    def _end_phase(self, phase: OpenPhase) -> None:
        if not self._works():
            return
        try:
            self._recording.end_phase(phase)
        except Exception as error:  # noqa: BLE001  # the training goes on
            self._give_up(error)


class PhaseBlock:
    """The block that `MemoryMonitor.phase` opens. A phase that nobody can end any more is forgotten."""

    __slots__ = ("_begin", "_end", "_name", "_open")

    def __init__(
        self, name: str, begin: Callable[[str], OpenPhase | None], end: Callable[[OpenPhase], None]
    ) -> None:
        self._name, self._begin, self._end = name, begin, end
        self._open: list[OpenPhase | None] = []

    def __enter__(self) -> None:
        self._open.append(self._begin(self._name))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        phase = self._open.pop() if self._open else None
        if phase is not None:
            self._end(phase)


def _seconds(given: float) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise TypeError(f"flush_seconds is a {type(given).__name__}; give a number")
    if not given > 0:
        raise MemPluginError(
            f"flush_seconds is {given}.", where="MemoryMonitor", fix="Give a number above 0, or leave it out."
        )
    return min(float(given), threading.TIMEOUT_MAX)


class _Stream:
    """The thread that writes what was recorded. It begins with the first step, and holds no monitor."""

    def __init__(
        self,
        logdir: str,
        worker: str | None,
        recording: StepRecording,
        seconds: float,
        logger: logging.Logger,
    ) -> None:
        self._logger = logger
        self._logdir, self._worker, self._recording, self._seconds = logdir, worker, recording, seconds
        self._pid = os.getpid()
        self._epoch_ns = time.time_ns()
        self._writer: StepsWriter | None = None
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None
        self._warned: set[str] = set()

    def stepped(self) -> None:
        """A step ended: from the first on there is something to write."""
        if self._thread is None:
            self._worker = self._worker or default_worker_name()
            self._thread = threading.Thread(target=self._run, name="tb_memplugin monitor", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Write the rest, and read the counters no more. A process that forked from ours leaves it to us."""
        if self._pid != os.getpid():
            return
        self._ending.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        try:
            self._recording.close()
        except Exception as error:  # the training goes on
            self._logger.debug("closing the counters failed", exc_info=error)

    def _run(self) -> None:
        self._ending.wait(min(1.0, self._seconds))  # the first steps show at once
        self.write()
        while not self._ending.wait(self._seconds):
            self.write()
        self.write(even_unused=True)

    def write(self, *, even_unused: bool = False) -> None:
        """Write the steps that ended since; what cannot be written waits."""
        with self._lock:
            if not even_unused and not all(one.in_use for one in self._recording.counters):
                return  # their names are not known yet
            rows = self._recording.take()
            while rows:
                part, rows = rows[:MOST_AT_ONCE], rows[MOST_AT_ONCE:]
                try:
                    self._write(part)
                except Exception as error:  # the training goes on
                    self._logger.debug("writing steps failed", exc_info=error)
                    self._recording.put_back([*part, *rows])
                    self._refuse(error)
                    return

    def _write(self, rows: Sequence[MonitoredStep]) -> None:
        if self._writer is None:
            worker = self._worker or default_worker_name()
            self._writer = StepsWriter(self._logdir, worker, self._epoch_ns, torch.__version__)
        dropped = self._recording.dropped
        notes = [f"{dropped:,} steps could not be written and are absent."] if dropped else []
        self._writer.write(figures_of(rows, self._recording.counters, notes))

    def _refuse(self, error: Exception) -> None:
        if isinstance(error, MemPluginError):
            self.warn(str(error))
            return
        told = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        self.warn(
            f"Figures of steps could not be written: {told}. They wait, and the training goes on.\n"
            f"  where: {self._logdir}\n"
            "  fix: Free space on the disk, or choose a folder that this process may write to."
        )

    def warn(self, message: str, once: str = "") -> None:
        """Say something once, or the first of its kind."""
        if (once or message) not in self._warned:
            self._warned.add(once or message)
            self._logger.warning("%s", message)
