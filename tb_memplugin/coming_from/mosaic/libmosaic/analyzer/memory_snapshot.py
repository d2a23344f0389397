"""Mosaic's class for a snapshot: its peak, its use at an allocation, and the stacks of both."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tb_memplugin import analysis
from tb_memplugin.errors import MemPluginError, NotRecordedError
from tb_memplugin.exports.snapshot import device_numbers, snapshot_of
from tb_memplugin.loading import load
from tb_memplugin.trace import Kind, MemoryTrace
from tb_memplugin.trace.frames import read_frame
from tb_memplugin.trace.kinds import SEGMENT_KINDS
from tb_memplugin.trace.tables import Rows

OPTIONS = ("memory_peak", "memory_usage", "alloc_history")

SEGMENT_ACTIONS = {kind.name.lower(): kind for kind in SEGMENT_KINDS}
FREE = ("free", "free_completed")
ACTIONS = ("alloc", *SEGMENT_ACTIONS, *FREE)


@dataclass(frozen=True, slots=True)
class Allocation:
    """An event at an address (hexadecimal, without 0x) that had been freed `version` times before."""

    action: str
    addr: str
    version: int = 0

    def to_str(self) -> str:
        """Return the key of `MemorySnapshot.memory_usage`."""
        return f"{self.action}: {self.addr}_{self.version}"


@dataclass(frozen=True, slots=True)
class MemoryEvent:
    """The blocks that one call stack allocated: their bytes in all, and by address.

    `call_stack` has a dict with name, filename and line for each frame, innermost first.
    """

    call_stack: list[dict[str, Any]]
    mem_size: int
    mem_size_per_call: dict[int, int]
    num_call: int


@dataclass(frozen=True, slots=True, order=True)
class MemoryUsage:
    """The bytes at a moment: requested, and reserved (0 if that is not known)."""

    total_alloc: int = 0
    total_reserved: int = 0

    @property
    def value(self) -> int:
        """The requested bytes."""
        return self.total_alloc

    def __truediv__(self, other: MemoryUsage | float) -> float:
        return self.value / (other.value if isinstance(other, MemoryUsage) else other)


class MemorySnapshot:
    """A snapshot file, and what `analyze_memory_snapshot` found in it. All sizes are bytes.

    Attributes:
        trace: the recording, once it is loaded.
        device: the device of the last analysis.
        memory_peak: the peak, the sum of the next two; -1 before an analysis.
        dynamic_memory_peak, static_memory: the bytes of the peak from the recording, and from before it.
        max_allocation_info: the event that reaches the peak.
        memory_usage: bytes after an event, by `Allocation.to_str`.
        call_stack_hash_set: what was alive at the peak or event, by stack, largest first.
        max_memory_usage: the peak of the window, or of the last range.
        memory_usage_history, call_stack: the live bytes after the events of the last range, and the lines
            that made them, by time in microseconds.
        snapshot_data: the snapshot as PyTorch writes it, once it is loaded.
    """

    def __init__(self, filename: str | os.PathLike[str] | None) -> None:
        self.snapshot_filename = "" if filename is None else os.fspath(filename)
        self._trace: MemoryTrace | None = None
        self.device = ""
        self.memory_peak = -1
        self.dynamic_memory_peak = 0
        self.static_memory = 0
        self.max_allocation_info = Allocation("", "")
        self.memory_usage: dict[str, int] = {}
        self.call_stack_hash_set: dict[int, MemoryEvent] = {}
        self.max_memory_usage = MemoryUsage()
        self.memory_usage_history: dict[int, MemoryUsage] = {}
        self.call_stack: dict[int, str] = {}

    def register_memory_snapshot(self, filename: str | os.PathLike[str]) -> None:
        """Set the file that `load_memory_snapshot` reads."""
        self.snapshot_filename = os.fspath(filename)

    def load_memory_snapshot(self, stream_load: bool = False) -> None:  # noqa: ARG002  # Mosaic's signature
        """Read the file; see `tb_memplugin.load` for the formats and the errors."""
        self._trace = load(self.snapshot_filename)
        vars(self).pop("_written", None)

    @cached_property
    def _written(self) -> dict[str, Any]:
        return snapshot_of(self.trace)[0]

    @property
    def snapshot_data(self) -> dict[str, Any]:
        """The snapshot as PyTorch writes it: segments, device_traces, ...; {} before it is loaded."""
        return {} if self._trace is None else self._written

    @property
    def trace(self) -> MemoryTrace:
        """The recording in the file.

        Raises:
            MemPluginError: the file has not been read yet.
        """
        if self._trace is None:
            raise MemPluginError(
                "The snapshot has not been read yet.",
                where=self.snapshot_filename,
                fix="Call load_memory_snapshot() first.",
            )
        return self._trace

    def analyze_memory_snapshot(
        self,
        opt: str = "memory_peak",
        allocation: str = "",
        action: str = "",
        profile_types: list[str] | None = None,  # noqa: ARG002  # the page divides, not the analysis
        custom_rules: Mapping[str, str] | None = None,  # noqa: ARG002
        start_time: int | None = None,
        end_time: int | None = None,
        preserve_allocation_order: bool = False,  # noqa: ARG002
    ) -> None:
        """Find the peak, or the use at an allocation, and set the attributes.

        Args:
            opt: "memory_peak", "memory_usage" or "alloc_history".
            allocation: `ADDRESS` or `ADDRESS_VERSION`, hexadecimal: look for the peak up to it, or for the
                use after it.
            action: its event, one of `ACTIONS`.
            start_time, end_time: look for the peak between these times, in microseconds as in the file.
            profile_types, custom_rules, preserve_allocation_order: `get_memory_profile` draws by them.

        Raises:
            MemPluginError: `opt`, `allocation` or `action` is none of these.
            NotRecordedError: the file has no such allocation, or nothing between the times.
        """
        if opt == "memory_usage":
            device, event = _event_of(self.trace, allocation, action)
            self._set_stacks(device, event)
            kind = "free_completed" if action in FREE else action
            address, version = analysis.read_allocation(allocation)
            self.memory_usage[Allocation(kind, f"{address:x}", version).to_str()] = int(
                self.trace.live(device)[event + 1]
            )
        elif opt == "memory_peak":
            self._find_peak(allocation, action, start_time, end_time)
        elif opt == "alloc_history":
            top = analysis.peak(self.trace)
            self.device = top.device
            self.max_memory_usage = MemoryUsage(top.bytes, top.reserved or 0)
        else:
            raise MemPluginError(
                f"There is no analysis {opt!r}.", where="opt", fix=f"Give one of: {', '.join(OPTIONS)}."
            )

    def _find_peak(self, allocation: str, action: str, start_time: int | None, end_time: int | None) -> None:
        trace, device = self.trace, None
        if start_time is not None or end_time is not None:
            self._require_times()
        first, last = analysis.events_between(
            trace,
            None if start_time is None else start_time * 1_000,
            None if end_time is None else end_time * 1_000 + 999,
        )
        if allocation:
            row, event = _event_of(trace, allocation, action)
            device, last = trace.devices[row].name, min(last, event)
        top = analysis.peak(trace, device, within=(first, last))
        self.device, self.memory_peak = top.device, top.bytes
        row = trace.device_row(top.device)
        alive = self._set_stacks(row, top.event)
        blocks = trace.allocations
        self.static_memory = int(blocks.bytes[alive][blocks.born[alive] < 0].sum())
        self.dynamic_memory_peak = top.bytes - self.static_memory
        self.max_allocation_info = _at(trace, row, top.event)

    def _require_times(self) -> None:
        if not self.trace.times_are_known:
            raise NotRecordedError(
                "This snapshot has no times: it has them since PyTorch 2.2.",
                where=self.snapshot_filename,
                fix="Give an allocation.",
            )

    def stat_memory_usage_range(self, device_idx: int = 0, start: int = -1, end: int = -1) -> None:
        """Set `memory_usage_history`, `call_stack` and `max_memory_usage` from a device's events.

        Args:
            device_idx: the device's number.
            start, end: the first and the last microsecond, as in the file; -1 for both: all.

        Raises:
            NotRecordedError: the file has no times, or no such device.
        """
        self._require_times()
        trace = self.trace
        row = next((row for row, number in device_numbers(trace).items() if number == device_idx), None)
        if row is None:
            names = ", ".join(device.name for device in trace.devices)
            raise NotRecordedError(
                f"There is no device {device_idx}.", where="device_idx", fix=f"There are: {names}."
            )
        events = trace.events
        time = events.time_ns // 1_000
        rows = np.flatnonzero(events.device == row)
        if start >= 0 or end >= 0:
            rows = rows[(time[rows] >= start) & (time[rows] <= end)]
        times, live = time[rows].tolist(), trace.live(row)[rows + 1].tolist()
        lines = {stack: self._lines_of(stack) for stack in np.unique(events.stack[rows]).tolist()}
        self.memory_usage_history = dict(zip(times, map(MemoryUsage, live), strict=True))
        self.call_stack = dict(zip(times, map(lines.__getitem__, events.stack[rows].tolist()), strict=True))
        self.max_memory_usage = MemoryUsage(max(live, default=0))

    def _lines_of(self, stack: int) -> str:
        frames = _frames(self.trace.stack(stack)) if stack >= 0 else []
        return "".join(f"{frame['filename']}: {frame['line']}<br>" for frame in frames)

    def _set_stacks(self, device: int, event: int) -> Rows:
        """Set the stacks of what is alive on a device after an event, and return its allocations."""
        alive = self.trace.allocations.alive_at(event, device)
        self.device = self.trace.devices[device].name
        self.call_stack_hash_set = _stacks(self.trace, alive)
        return alive

    def get_memory_usage_by_annotation_stage(
        self, annotation_substring: Collection[str]
    ) -> dict[str, tuple[dict[str, Any], int]]:
        """Return live bytes at the START and END of annotations, in time order, by `{name}_{stage}`.

        From the second time on a key ends with `(1)`, `(2)`, ... Each value is the annotation, with its name,
        stage, device (its number) and time_us, and the bytes. The device is the one with the highest peak
        among those that have such annotations.

        Args:
            annotation_substring: texts of which one is in the name of each annotation; none: all.
        """
        trace = self.trace
        names = [
            name
            for name in trace.annotation_names
            if not annotation_substring or any(text in name for text in annotation_substring)
        ]
        stages = analysis.stages(trace, names)
        device = max(
            {stage.device for stage in stages}, key=lambda name: analysis.peak(trace, name).bytes, default=""
        )
        number = int(device.partition(":")[2] or 0)
        return {
            stage.key: (
                {
                    "name": stage.name,
                    "stage": stage.stage,
                    "device": number,
                    "time_us": stage.time_ns // 1_000,
                },
                stage.bytes,
            )
            for stage in stages
            if stage.device == device
        }


def _stacks(trace: MemoryTrace, alive: Rows) -> dict[int, MemoryEvent]:
    """Return what each stack allocated, largest first; blocks without a stack are left out, as in Mosaic."""
    blocks = trace.allocations
    alive = alive[blocks.stack[alive] >= 0]
    alive = alive[np.argsort(blocks.stack[alive], kind="stable")]
    rows, first = np.unique(blocks.stack[alive], return_index=True)
    stacks = []
    for row, own in zip(rows.tolist(), np.split(alive, first[1:]), strict=True) if len(rows) else ():
        size = blocks.bytes[own]
        by_address = dict(zip(blocks.address[own].tolist(), size.tolist(), strict=True))
        frames = trace.stack(row)
        stacks.append((hash(frames), MemoryEvent(_frames(frames), int(size.sum()), by_address, len(own))))
    return dict(sorted(stacks, key=lambda stack: -stack[1].mem_size))


def _frames(texts: Iterable[str]) -> list[dict[str, Any]]:
    frames = map(read_frame, texts)
    return [{"name": frame.function, "filename": frame.file, "line": frame.line} for frame in frames]


def _event_of(trace: MemoryTrace, allocation: str, action: str) -> tuple[int, int]:
    """Return the row of a device and the event of an action at an allocation.

    Raises:
        MemPluginError: the text is no allocation, or there is no such action.
        NotRecordedError: the file has no such event.
    """
    address, version = analysis.read_allocation(allocation)
    if action not in ACTIONS:
        raise MemPluginError(
            f"There is no action {action!r}.", where="action", fix=f"Give one of: {', '.join(ACTIONS)}."
        )
    if action not in SEGMENT_ACTIONS:
        at = analysis.usage(trace, address, version, "free" if action in FREE else "alloc")
        return trace.device_row(at.device), at.event
    events = trace.events
    for device in range(len(trace.devices)):
        here = (events.device == device) & (events.address == np.uint64(address & 0xFFFF_FFFF_FFFF_FFFF))
        freed = np.flatnonzero(here & (events.kind == Kind.FREE_COMPLETED))
        rows = np.flatnonzero(here & (events.kind == SEGMENT_ACTIONS[action]))
        rows = rows[np.searchsorted(freed, rows) == version]
        if len(rows):
            return device, int(rows[0])
    raise NotRecordedError(
        f"There is no {action} at {address:#x}_{version}.", where="allocation", fix="Give another address."
    )


def _at(trace: MemoryTrace, device: int, event: int) -> Allocation:
    """Return an event as an allocation; the moment before the first event has no address."""
    if event < 0:
        return Allocation("", "")
    events = trace.events
    address = events.address[event]
    freed = (events.address[:event] == address) & (events.device[:event] == device)
    freed &= events.kind[:event] == Kind.FREE_COMPLETED
    return Allocation(Kind(int(events.kind[event])).name.lower(), f"{int(address):x}", int(freed.sum()))
