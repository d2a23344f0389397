"""`MemoryTrace`: everything that happened to memory in one window, whatever it was read from."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from tb_memplugin.errors import NotRecordedError
from tb_memplugin.trace.allocator import Annotations, OutOfMemory, Segments
from tb_memplugin.trace.replay import Allocations, live_levels, pair, window_levels
from tb_memplugin.trace.tables import Device, Events, Int64, Module, Spans, StartState, Step


@dataclass(frozen=True)
class MemoryTrace:
    """Columns of allocator events on named devices, plus the tables they point into.

    Built once, then read-only. What is derived (`allocations`, `live`, `window`) is computed on
    first use and kept. An event's index is its place in `events`; -1 stands for the moment before
    the first event, when exactly `start` is alive.

    Attributes:
        source: what made it, for people: "torch.profiler", "snapshot", ...
        events: the events, in time order.
        start: what was alive before the first event.
        devices, operators, modules, labels, stacks: the tables that rows point into.
        steps: profiled steps in time order, at least one.
        phases: stretches of forward, backward, optimizer.
        calls: module calls (forward, and autograd nodes with the module that owns them).
        segments: what the allocator had reserved before the first event.
        annotations, annotation_names: named ranges beside the events, and the names.
        streams: stream pointers; pools: pool ids; contexts: what torch.compile was compiling.
        ooms: requests that failed, in event order.
        notes: what is not exact, and by how much: sentences for the reader.
        properties: versions and settings worth showing.
    """

    source: str
    events: Events
    start: StartState
    devices: tuple[Device, ...]
    steps: tuple[Step, ...]
    operators: tuple[str, ...] = ()
    modules: tuple[Module, ...] = ()
    labels: tuple[str, ...] = ()
    stacks: tuple[tuple[str, ...], ...] = ()
    phases: Spans = field(default_factory=Spans)
    calls: Spans = field(default_factory=Spans)
    segments: Segments = field(default_factory=Segments)
    annotations: Annotations = field(default_factory=Annotations)
    annotation_names: tuple[str, ...] = ()
    streams: tuple[int, ...] = ()
    pools: tuple[tuple[int, int], ...] = ()
    contexts: tuple[str, ...] = ()
    ooms: tuple[OutOfMemory, ...] = ()
    notes: tuple[str, ...] = ()
    properties: dict[str, str] = field(default_factory=dict)

    @cached_property
    def allocations(self) -> Allocations:
        """Every block that was ever alive: the start state first, then one row per alloc event."""
        return pair(self.events, self.start)

    @cached_property
    def _live(self) -> dict[int, Int64]:
        return {}

    @cached_property
    def _window(self) -> dict[int, Int64]:
        return {}

    def live(self, device: int) -> Int64:
        """Live bytes on a device: int64, shape (events + 1,); entry e + 1 holds after event e."""
        if device not in self._live:
            self._live[device] = live_levels(self.allocations, len(self.events), device)
        return self._live[device]

    def window(self, device: int) -> Int64:
        """Running sum of what the source itself reported, from 0: int64, shape (events + 1,)."""
        if device not in self._window:
            self._window[device] = window_levels(self.events, device)
        return self._window[device]

    @cached_property
    def _step_bounds(self) -> Int64:
        starts = np.array([step.start_ns for step in self.steps[1:]], np.int64)
        inner = np.searchsorted(self.events.time_ns, starts, side="left")
        return np.concatenate(([0], inner, [len(self.events)])).astype(np.int64)

    def step_events(self, step: int) -> tuple[int, int]:
        """The half-open range of event indices of a step, by its row in `steps`.

        Every event belongs to exactly one step: what falls between two spans goes to the earlier one.
        """
        return int(self._step_bounds[step]), int(self._step_bounds[step + 1])

    def step_at(self, event: int) -> Step:
        """The step to which an event belongs; the first one for the moment before all events."""
        row = int(np.searchsorted(self._step_bounds[1:-1], event, side="right"))
        return self.steps[row]

    def step_row(self, number: int) -> int:
        """The row in `steps` of the step with this number.

        Raises:
            NotRecordedError: no such step.
        """
        for row, step in enumerate(self.steps):
            if step.number == number:
                return row
        have = ", ".join(str(step.number) for step in self.steps)
        raise NotRecordedError(
            f"Step {number} was not recorded.", where=self.source, fix=f"Choose one of: {have}."
        )

    def device_row(self, name: str) -> int:
        """The row in `devices` of the device with this name.

        Raises:
            NotRecordedError: no such device.
        """
        for row, device in enumerate(self.devices):
            if device.name == name:
                return row
        have = ", ".join(device.name for device in self.devices)
        raise NotRecordedError(
            f"Device {name!r} has no events here.", where=self.source, fix=f"Choose one of: {have}."
        )

    def event_at(self, time_ns: int) -> int:
        """Index of the last event at or before a time, -1 when there is none."""
        return int(np.searchsorted(self.events.time_ns, time_ns, side="right")) - 1
