"""`MemoryTrace`: all memory events of one window, in the same form for every source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from functools import cached_property
from importlib import import_module
from typing import Any, TypeVar

import numpy as np

from tb_memplugin.errors import NotRecordedError
from tb_memplugin.trace.allocator import Annotations, OutOfMemory, PoolId, Segments
from tb_memplugin.trace.counters import CounterReading, WholeDevice
from tb_memplugin.trace.indexes import PartSums, Runs, runs_of
from tb_memplugin.trace.kinds import SEGMENT_KINDS, Kind
from tb_memplugin.trace.notes import Note
from tb_memplugin.trace.replay import Allocations, live_levels, pair, reserved_levels, window_levels
from tb_memplugin.trace.result import Column, Tabular
from tb_memplugin.trace.tables import (
    Device,
    Events,
    Int32,
    Int64,
    Module,
    Spans,
    StartState,
    Step,
    TensorMetadata,
    code_mask,
    pieces_of,
)

Result = TypeVar("Result")

NEIGHBORS = 1_000
"""Among how many events a device's next one is looked for first; then among twice as many, and so on."""


@dataclass(frozen=True)
class MemoryTrace(Tabular):
    """Columns of allocator events on named devices, plus the tables they point into.

    A trace is built once, then read-only. Derived values (`allocations`, `live`, `reserved`, `window`) are
    computed on first use and cached. An event's index is its position in `events`; -1 is the moment before
    the first event, when exactly the blocks of `start` are alive.

    Attributes:
        source: what recorded the trace, as text for people: "torch.profiler", "snapshot", ...
        events: the events, in time order.
        start: the blocks that were alive before the first event.
        devices, operators, modules, labels, stacks: the tables whose rows the columns refer to.
        steps: profiled steps in time order, at least one.
        phases: time ranges of forward, backward and optimizer.
        calls: module calls (forward calls, and autograd nodes with the module that owns them).
        segments: the ranges that the allocator had reserved before the first event.
        annotations, annotation_names: starts and ends of named ranges, and their names.
        tensors: what the tensors are that the blocks hold, each once.
        streams, pools, contexts: stream pointers, pool ids, and what torch.compile was compiling.
        ooms: failed allocations, in event order.
        counters: what counters of others say of the devices' live bytes; empty if this was not recorded.
        whole_devices: what filled the devices, PyTorch and others; empty if this was not recorded.
        notes: what is not exact, and by how much.
        properties: versions and settings to show.
        paired: `allocations`, from those who have computed them already.
    """

    source: str
    events: Events
    start: StartState
    devices: tuple[Device, ...]
    steps: tuple[Step, ...]
    operators: tuple[str, ...] = ()
    modules: tuple[Module, ...] = field(default_factory=tuple)
    labels: tuple[str, ...] = ()
    stacks: tuple[tuple[str, ...], ...] = ()
    phases: Spans = field(default_factory=Spans)
    calls: Spans = field(default_factory=Spans)
    segments: Segments = field(default_factory=Segments)
    annotations: Annotations = field(default_factory=Annotations)
    annotation_names: tuple[str, ...] = ()
    tensors: tuple[TensorMetadata, ...] = ()
    streams: tuple[int, ...] = ()
    pools: tuple[PoolId, ...] = ()
    contexts: tuple[str, ...] = ()
    ooms: tuple[OutOfMemory, ...] = ()
    counters: tuple[CounterReading, ...] = ()
    whole_devices: tuple[WholeDevice, ...] = ()
    notes: tuple[Note, ...] = field(default_factory=tuple)
    properties: dict[str, str] = field(default_factory=dict)
    paired: InitVar[Allocations | None] = None

    def __post_init__(self, paired: Allocations | None) -> None:
        if paired is not None:
            self.__dict__["allocations"] = paired

    def __repr__(self) -> str:
        """Return what it is in a line; columns of millions of events are not for reading."""
        devices = ", ".join(device.name for device in self.devices) or "no device"
        return f"<MemoryTrace of {self.source!r}: {len(self.events):,} events on {devices}>"

    def columns(self) -> dict[str, Column]:
        """Return the allocations, one a row: see `exports.csv`."""
        # By name: lines and divisions are told by the analyses, which stand above the trace.
        columns: dict[str, Column] = import_module("tb_memplugin.exports.csv").columns(self)
        return columns

    @cached_property
    def allocations(self) -> Allocations:
        """Every block that was ever alive: the start state first, then one row per alloc event."""
        return pair(self.events, self.start)

    @cached_property
    def _results(self) -> dict[tuple[object, ...], Any]:
        return {}

    def _once(self, key: tuple[object, ...], compute: Callable[[], Result]) -> Result:
        if key not in self._results:
            self._results[key] = compute()
        result: Result = self._results[key]
        return result

    def live(self, device: int) -> Int64:
        """Return the live bytes on a device: int64, shape (events + 1,); entry e + 1 is after event e."""
        return self._once(("live", device), lambda: self._live(device))

    def _live(self, device: int) -> Int64:
        live = live_levels(self.allocations, self.allocations.bytes, len(self.events), device)
        return self.events.kept(lambda: (live,))

    def live_runs(self, device: int) -> Runs[np.int64]:
        """Return the lowest and highest of runs of `live`."""
        return self._once(("live_runs", device), lambda: runs_of(self.live(device)))

    def part_sums(
        self, device: int, by: str, codes: Callable[[slice], tuple[Int64, Sequence[str]]]
    ) -> PartSums:
        """Return the live bytes by part at regular moments.

        Args:
            device: row in `devices`.
            by: the name of the division, the same for the same result of `codes`.
            codes: returns the part of each of some allocations, int64, and the names of the parts.
        """
        return self._once(("part_sums", device, by), lambda: self._part_sums(device, codes))

    def _part_sums(self, device: int, codes: Callable[[slice], tuple[Int64, Sequence[str]]]) -> PartSums:
        blocks, kept = self.allocations, self.events.kept
        _, parts = codes(slice(0, 0))
        part = kept(lambda: (codes(rows)[0].astype(np.int32) for rows in pieces_of(len(blocks))))
        own = blocks.device == device
        size = blocks.bytes if own.all() else kept(lambda: (blocks.bytes * own,))
        return PartSums(blocks.born, blocks.freed, blocks.freed_by, size, part, len(parts), kept)

    def reserved(self, device: int) -> Int64 | None:
        """Return the reserved bytes on a device: int64, shape (events + 1,), indexed as `live`.

        Before the first event it is the device's `reserved_at_start`; if that is not known, the sum of the
        segments at the start; if there are none, the value that the first event reports. None if the device
        keeps no reserve, or if nothing of this is known.
        """
        return self._once(("reserved", device), lambda: self._reserved_levels(device))

    def reserved_runs(self, device: int) -> Runs[np.int64] | None:
        """Return the lowest and highest of runs of `reserved`; None if that is not known."""
        reserved = self.reserved(device)
        return None if reserved is None else self._once(("reserved_runs", device), lambda: runs_of(reserved))

    def _reserved_levels(self, device: int) -> Int64 | None:
        if not self.devices[device].has_reserved:
            return None
        start, own = self.devices[device].reserved_at_start, self.segments.device == device
        if start is None and own.any():
            start = int(self.segments.bytes[own].sum())
        return reserved_levels(self.events, device, start)

    def window(self, device: int) -> Int64:
        """Return the running sum of reported bytes on a device, from 0: int64, shape (events + 1,)."""
        return self._once(("window", device), lambda: window_levels(self.events, device))

    @cached_property
    def _step_bounds(self) -> Int64:
        starts = np.array([step.start_ns for step in self.steps[1:]], np.int64)
        inner = np.searchsorted(self.events.time_ns, starts, side="left")
        return np.concatenate(([0], inner, [len(self.events)])).astype(np.int64)

    def step_events(self, step: int) -> tuple[int, int]:
        """Return the half-open range of event indices of a step, given by its row in `steps`.

        Every event belongs to exactly one step: an event between two steps belongs to the earlier one.
        """
        return int(self._step_bounds[step]), int(self._step_bounds[step + 1])

    def step_at(self, event: int) -> Step:
        """Return the step to which an event belongs; the first step for the moment before all events."""
        row = int(np.searchsorted(self._step_bounds[1:-1], event, side="right"))
        return self.steps[row]

    def step_row(self, number: int) -> int:
        """Return the row in `steps` of the step with this number.

        Raises:
            NotRecordedError: no step has this number.
        """
        for row, step in enumerate(self.steps):
            if step.number == number:
                return row
        have = ", ".join(str(step.number) for step in self.steps)
        raise NotRecordedError(
            f"Step {number} was not recorded.", where=self.source, fix=f"Choose one of: {have}."
        )

    def device_row(self, name: str) -> int:
        """Return the row in `devices` of the device with this name.

        Raises:
            NotRecordedError: no device has this name.
        """
        for row, device in enumerate(self.devices):
            if device.name == name:
                return row
        have = ", ".join(device.name for device in self.devices)
        raise NotRecordedError(
            f"Device {name!r} has no events here.", where=self.source, fix=f"Choose one of: {have}."
        )

    def device_rows(self, name: str | None) -> Sequence[int]:
        """Return the row of the device with this name, or, for None, those of all devices.

        Raises:
            NotRecordedError: no device has this name.
        """
        return range(len(self.devices)) if name is None else [self.device_row(name)]

    def time_of(self, event: int) -> int:
        """Return the time of an event in epoch nanoseconds; for -1, the start of the first step."""
        return int(self.events.time_ns[event]) if event >= 0 else self.steps[0].start_ns

    def stack(self, row: int) -> tuple[str, ...]:
        """Return a row of `stacks`: the frames, innermost first; () for row -1, which means no stack."""
        return self.stacks[row] if row >= 0 else ()

    def event_at(self, time_ns: int) -> int:
        """Return the index of the last event at or before a time, -1 if there is none."""
        return int(np.searchsorted(self.events.time_ns, time_ns, side="right")) - 1

    def next_event(self, device: int, event: int) -> int | None:
        """Return the index of a device's first event at or after an event, None if there is none."""
        column, width = self.events.device, NEIGHBORS
        while event < len(column):
            own = column[event : event + width] == device
            if own.any():
                return event + int(own.argmax())
            event, width = event + width, 2 * width
        return None

    def previous_event(self, device: int, event: int) -> int | None:
        """Return the index of a device's last event before an event, None if there is none."""
        column, width = self.events.device, NEIGHBORS
        while event > 0:
            own = column[max(event - width, 0) : event][::-1] == device
            if own.any():
                return event - 1 - int(own.argmax())
            event, width = event - width, 2 * width
        return None

    @property
    def first_time_ns(self) -> int:
        """The earliest time of all, epoch nanoseconds; 0 if there is none."""
        first = [int(time[0]) for time in (self.events.time_ns, self.annotations.time_ns) if len(time)]
        return min(first + [step.start_ns for step in self.steps[:1]], default=0)

    @cached_property
    def own_stacks(self) -> Int32:
        """The row of the stack with which each event happened, -1 if that is not known: int32, (events,).

        In snapshots without `context="all"`, a free has its allocation's (CUDACachingAllocator.cpp, `free`).
        """
        blocks, stack = self.allocations, self.events.stack
        if not self.stacks:
            return stack
        both = (blocks.born >= 0) & (blocks.freed < len(stack))
        if not both.any() or (stack[blocks.born[both]] != stack[blocks.freed[both]]).any():
            return stack
        frees = code_mask((Kind.FREE_REQUESTED, Kind.FREE_COMPLETED))[self.events.kind]
        return self.events.kept(lambda: (np.where(frees, np.int32(-1), stack),))

    @property
    def times_are_known(self) -> bool:
        """False if event indices stand for times, as in snapshots of PyTorch before 2.2."""
        time = self.events.time_ns
        if not len(time) or time[0] != 0:
            return bool(len(time))
        return any(
            bool((own != 1_000 * np.arange(len(own))).any())
            for own in (time[self.events.device == row] for row in range(len(self.devices)))
        )

    def records_segments(self, device: int) -> bool:
        """Return whether segments of a device, or events of them, are recorded."""
        changes = code_mask(SEGMENT_KINDS)[self.events.kind] & (self.events.device == device)
        return bool((self.segments.device == device).any() or changes.any())

    def is_used(self, device: int) -> bool:
        """Return whether a device has any allocation, event or segment."""
        tables = (self.allocations, self.events, self.segments)
        return any(bool((table.device == device).any()) for table in tables)
