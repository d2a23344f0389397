"""Record steps and named phases by reading counters at their boundaries; keep the steps until taken."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tb_memplugin.record.steps.counters import NOTHING, Counters, ProcessCounters, Reading
from tb_memplugin.trace.notes import Note
from tb_memplugin.trace.step_figures import DeviceFigures, PhaseBytes, PhaseFigures, StepFigures
from tb_memplugin.trace.tables import Int64

MOST_PHASES = 32
"""The largest number of distinct phase names; further ones are merged into `OTHER_PHASES`."""

OTHER_PHASES = "(other phases)"

MOST_WAITING = 200_000
"""The largest number of steps kept while they cannot be written; beyond that the oldest are dropped."""

_PHASE_NAME = 200

FREE_READINGS = 10
"""So many steps have figures of their own, whatever that costs."""


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """The figures of a device in one step, in bytes.

    Attributes:
        device: the device as torch spells it; "process" for the memory of the process.
        peak_allocated, allocated: the highest bytes within the step, and the bytes when it ended.
        exact: whether `peak_allocated` is exact; otherwise it is a lower bound.
        peak_reserved, reserved: the same for reserved bytes; None if the device has no reserve.
        num_alloc_retries, num_ooms, allocations, allocated_bytes: counts within the step; None if the device
            has no counts, as the process has not.
        requested: allocated bytes as requested, when the step ended; None if not counted.
        whole_free, whole_total: free and all bytes of the whole device when the step ended; of the process,
            those of the machine or its cgroup's limit. None if not known.
        heap_free: what the C library holds free in the heap of the process when the step ended. None if not
            known; it is not read in each of many short steps.
    """

    device: str
    peak_allocated: int
    exact: bool
    allocated: int
    peak_reserved: int | None = None
    reserved: int | None = None
    num_alloc_retries: int | None = None
    num_ooms: int | None = None
    allocations: int | None = None
    allocated_bytes: int | None = None
    requested: int | None = None
    whole_free: int | None = None
    whole_total: int | None = None
    heap_free: int | None = None

    @property
    def fragmentation(self) -> float | None:
        """(reserved - allocated) / reserved when the step ended; None without a reserve."""
        if self.reserved is None:
            return None
        return (self.reserved - self.allocated) / self.reserved if self.reserved else 0.0


@dataclass(frozen=True, slots=True)
class PhaseStep:
    """A named phase in one step: the number and total nanoseconds of its runs, and bytes by device.

    `peak_bytes` is the highest value in any run, `exact` whether it is exact, and `end_bytes` the value when
    the last run ended.
    """

    name: str
    count: int
    duration_ns: int
    peak_bytes: tuple[int, ...]
    exact: tuple[bool, ...]
    end_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MonitoredStep:
    """One step. `duration_ns` is the time since the end of the previous step, on the host's clock."""

    step: int
    duration_ns: int
    devices: tuple[DeviceStep, ...]
    phases: tuple[PhaseStep, ...]


class Highs:
    """The peaks of each device since some boundary."""

    __slots__ = ("exact", "peaks", "reserved")

    def __init__(self, now: Sequence[Reading]) -> None:
        self.peaks = [reading.allocated for reading in now]
        self.reserved = [reading.reserved for reading in now]
        self.exact = [False] * len(now)

    def add(self, readings: Sequence[Reading]) -> None:
        """Add the time from the last boundary to this one."""
        for row, reading in enumerate(readings):
            self.raise_to(row, reading.peak, reading.exact)
            if reading.peak_reserved > self.reserved[row]:
                self.reserved[row] = reading.peak_reserved

    def raise_to(self, row: int, peak: int, exact: bool) -> None:
        """Raise a device's peak. An exact peak is the highest value ever, so it also settles an equal one."""
        if peak > self.peaks[row]:
            self.peaks[row], self.exact[row] = peak, exact
        elif peak == self.peaks[row]:
            self.exact[row] |= exact


@dataclass(eq=False)
class OpenPhase:
    """A running phase. The recording holds it weakly: without an owner that can end it, it is dropped."""

    name: str
    begin_ns: int
    highs: Highs


@dataclass(slots=True)
class _Ended:
    highs: Highs
    count: int = 0
    duration_ns: int = 0
    ends: tuple[int, ...] = ()


class Allowance:
    """Says whether a step's figures may be read, so that all readings take at most a share of the time.

    Args:
        share: the share, above 0. None: they may always be read.
    """

    def __init__(self, share: float | None) -> None:
        self._share = share
        self._readings = self._due_ns = 0

    def is_due(self) -> bool:
        """Whether enough time has passed since the last reading."""
        return self._share is None or time.perf_counter_ns() >= self._due_ns

    def spent(self, duration_ns: int) -> None:
        """Wait, after a reading that took so long, until it is a small enough share of the time."""
        self._readings += 1
        if self._share is not None and self._readings >= FREE_READINGS:
            self._due_ns = time.perf_counter_ns() + int(duration_ns / self._share)


class StepRecording:
    """Records figures of steps and phases from counters. Any thread may begin and end phases.

    Nothing is read before `begin`. Every method may raise the exceptions of the counters.
    """

    def __init__(self, counters: Sequence[Counters]) -> None:
        self.counters = tuple(counters)
        self._lock = threading.RLock()
        self._phases: weakref.WeakSet[OpenPhase] = weakref.WeakSet()
        self._ended: dict[str, _Ended] = {}
        self._names: set[str] = set()
        self._rows: deque[MonitoredStep] = deque()
        self._skipped = self._joined = 0
        self._is_closed = False
        self.dropped = 0
        self.last: MonitoredStep | None = None
        self._first = self._last = [NOTHING for _ in self.counters]
        self._highs = Highs(self._last)
        self._begin_ns = time.perf_counter_ns()

    def begin_phase(self, name: str) -> OpenPhase:
        """Begin a phase."""
        with self._lock:
            self._boundary()
            phase = OpenPhase(self._phase_name(name), time.perf_counter_ns(), Highs(self._last))
            self._phases.add(phase)
            return phase

    def end_phase(self, phase: OpenPhase) -> None:
        """End a phase; it is counted in the current step."""
        with self._lock:
            self._boundary()
            self._phases.discard(phase)
            ended = self._ended.setdefault(phase.name, _Ended(phase.highs))
            for row, peak in enumerate(phase.highs.peaks):
                ended.highs.raise_to(row, peak, phase.highs.exact[row])
            ended.count += 1
            ended.duration_ns += time.perf_counter_ns() - phase.begin_ns
            ended.ends = tuple(reading.allocated for reading in self._last)

    def end_step(self, number: int | None = None) -> MonitoredStep:
        """End a step and return it; without a number it gets the one after the last step's, from 0."""
        with self._lock:
            self._boundary()
            now = time.perf_counter_ns()
            before = self.last.step if self.last is not None else -1
            rows = zip(self.counters, self._first, self._last, strict=True)
            self.last = MonitoredStep(
                step=before + 1 + self._skipped if number is None else number,
                duration_ns=now - self._begin_ns,
                devices=tuple(
                    _device_step(counters, first, last, self._highs, row)
                    for row, (counters, first, last) in enumerate(rows)
                ),
                phases=tuple(_phase_step(name, ended) for name, ended in self._ended.items()),
            )
            self._rows.append(self.last)
            if len(self._rows) > MOST_WAITING:
                self._rows.popleft()
                self.dropped += 1
            self._begin_ns, self._first, self._highs, self._ended = now, self._last, Highs(self._last), {}
            self._skipped = self._joined = 0
            return self.last

    def join_step(self) -> None:
        """End a step whose figures become part of the next step's. Nothing is read."""
        with self._lock:
            self._skipped += 1
            self._joined += 1

    def end_joined(self) -> None:
        """Read the figures of the last steps that were joined, if any. They include what happened since."""
        with self._lock:
            if self._joined:
                self._skipped -= 1
                self.end_step()

    def skip_step(self) -> None:
        """End a step without figures. Its phases are forgotten, and its number is not used again."""
        with self._lock:
            self._skipped += 1
            self._phases.clear()
            self._ended = {}
            self.begin()

    def begin(self) -> None:
        """Begin the first step now; earlier peaks are not counted."""
        with self._lock:
            self._boundary()
            self._begin_ns, self._first, self._highs = time.perf_counter_ns(), self._last, Highs(self._last)
            self._joined = 0

    def waiting(self) -> list[MonitoredStep]:
        """Return the steps that ended and are not forgotten: a signal between the two calls loses none."""
        with self._lock:
            return list(self._rows)

    def forget(self, rows: Sequence[MonitoredStep]) -> None:
        """Forget steps that are written."""
        with self._lock:
            while self._rows and rows and self._rows[0].step <= rows[-1].step:
                self._rows.popleft()

    def close(self) -> None:
        """Close all counters. A thread that goes on at the end of the process reads nothing more."""
        with self._lock:
            self._is_closed = True
            for counter in self.counters:
                counter.close()

    def _boundary(self) -> None:
        """Read all counters, and add the peaks since the last boundary to the step and all running phases."""
        if self._is_closed:
            return
        self._last = [counter.read() for counter in self.counters]
        self._highs.add(self._last)
        for phase in self._phases:
            phase.highs.add(self._last)

    def _phase_name(self, name: str) -> str:
        name = str(name)[:_PHASE_NAME]
        if name in self._names or len(self._names) < MOST_PHASES:
            self._names.add(name)
            return name
        return OTHER_PHASES


def _device_step(counters: Counters, first: Reading, last: Reading, highs: Highs, row: int) -> DeviceStep:
    free, total = counters.free() or (None, None)
    figures = counters.name, highs.peaks[row], highs.exact[row], last.allocated
    if isinstance(counters, ProcessCounters):
        return DeviceStep(*figures, whole_free=free, whole_total=total, heap_free=counters.heap_free())
    return DeviceStep(
        *figures,
        peak_reserved=highs.reserved[row],
        reserved=last.reserved,
        num_alloc_retries=_since(first.retries, last.retries),
        num_ooms=_since(first.ooms, last.ooms),
        allocations=_since(first.allocations, last.allocations),
        allocated_bytes=_since(first.allocated_bytes, last.allocated_bytes),
        requested=last.requested,
        whole_free=free,
        whole_total=total,
    )


def _since(first: int, last: int) -> int:
    """Return how far a counter rose; if the user has reset it meanwhile, its current value."""
    return last - first if last >= first else last


def _phase_step(name: str, ended: _Ended) -> PhaseStep:
    highs = ended.highs
    return PhaseStep(name, ended.count, ended.duration_ns, tuple(highs.peaks), tuple(highs.exact), ended.ends)


def figures_of(
    rows: Sequence[MonitoredStep], counters: Sequence[Counters], notes: Sequence[Note] = ()
) -> StepFigures:
    """Return steps, of which there must be at least one, as columns."""
    names = list(dict.fromkeys(phase.name for step in rows for phase in step.phases))
    return StepFigures(
        steps=_column([step.step for step in rows]),
        durations_ns=_column([step.duration_ns for step in rows]),
        devices=tuple(
            _device_figures([step.devices[row] for step in rows], counter)
            for row, counter in enumerate(counters)
        ),
        phases=tuple(_phase_figures(rows, name, len(counters)) for name in names),
        notes=tuple(notes),
    )


def _device_figures(steps: Sequence[DeviceStep], counters: Counters) -> DeviceFigures:
    reserve = counters.kind == "allocator"
    return DeviceFigures(
        name=counters.name,
        kind=counters.kind,
        product=counters.product,
        capacity=counters.capacity,
        peak=_column([step.peak_allocated for step in steps]),
        at_least=np.array([not step.exact for step in steps], np.bool_),
        end=_column([step.allocated for step in steps]),
        peak_reserved=_column([step.peak_reserved or 0 for step in steps]) if reserve else None,
        end_reserved=_column([step.reserved or 0 for step in steps]) if reserve else None,
        retries=_column([step.num_alloc_retries or 0 for step in steps]) if reserve else None,
        ooms=_column([step.num_ooms or 0 for step in steps]) if reserve else None,
        allocations=_column([step.allocations or 0 for step in steps]) if reserve else None,
        allocated_bytes=_column([step.allocated_bytes or 0 for step in steps]) if reserve else None,
        end_requested=_column_if_any([step.requested for step in steps]),
        whole_free=_column_if_any([step.whole_free for step in steps]),
        whole_total=_column_if_any([step.whole_total for step in steps]),
        heap_free=None if reserve else _or_minus_one([step.heap_free for step in steps]),
    )


def _phase_figures(steps: Sequence[MonitoredStep], name: str, devices: int) -> PhaseFigures:
    absent = PhaseStep(name, 0, 0, (0,) * devices, (True,) * devices, (0,) * devices)
    phases = [next((phase for phase in step.phases if phase.name == name), absent) for step in steps]
    return PhaseFigures(
        name=name,
        counts=_column([phase.count for phase in phases]),
        durations_ns=_column([phase.duration_ns for phase in phases]),
        devices=tuple(
            PhaseBytes(
                peak=_column([phase.peak_bytes[row] for phase in phases]),
                at_least=np.array([not phase.exact[row] for phase in phases], np.bool_),
                end=_column([phase.end_bytes[row] for phase in phases]),
            )
            for row in range(devices)
        ),
    )


def _column_if_any(values: Sequence[int | None]) -> Int64 | None:
    """Return a column with -1 for what is not known; None if nothing is."""
    return _or_minus_one(values) if any(value is not None for value in values) else None


def _or_minus_one(values: Sequence[int | None]) -> Int64:
    return _column([-1 if value is None else value for value in values])


def _column(values: Sequence[int]) -> Int64:
    return np.array(values, np.int64)
