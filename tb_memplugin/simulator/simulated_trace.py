"""Convert a replay into a trace of its own, which every view, command and export shows like any other."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from operator import itemgetter
from typing import TypeVar

import numpy as np

from tb_memplugin.simulator.allocator_settings import OF_SETTINGS
from tb_memplugin.simulator.replay import Replay
from tb_memplugin.trace import (
    Annotations,
    Counter,
    Device,
    Events,
    Kind,
    MemoryTrace,
    Note,
    OutOfMemory,
    Segments,
    StartState,
    at_every_moment,
)
from tb_memplugin.trace.allocator import RESERVE_SIGN
from tb_memplugin.trace.kinds import GROWS, SEGMENT_KINDS
from tb_memplugin.trace.tables import EVENT_DTYPES, Int64, UInt64, code_mask

T = TypeVar("T")


class Ranges:
    """Rows (start, end, owner) of addresses that never overlap, in order. Adjacent ones are not joined."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, tuple[int, int, int]]] = []

    def add(self, start: int, end: int, owner: tuple[int, int, int]) -> None:
        """Add a range. Where it overlaps others, those stay as they are."""
        first, last = self._touched(start, end)
        overlapping = self.rows[first:last]
        edges = [start, *(edge for row in overlapping for edge in row[:2]), end]
        gaps = [(low, high, owner) for low, high in zip(edges[::2], edges[1::2], strict=True) if low < high]
        self.rows[first:last] = sorted([*overlapping, *gaps])

    def remove(self, start: int, end: int) -> None:
        """Remove a range. Others that cross its edges are cut."""
        first, last = self._touched(start, end)
        touched = self.rows[first:last]
        below = [(low, start, owner) for low, _, owner in touched[:1] if low < start]
        above = [(end, high, owner) for _, high, owner in touched[-1:] if high > end]
        self.rows[first:last] = below + above

    def _touched(self, start: int, end: int) -> tuple[int, int]:
        """Return (first, last) such that the rows [first, last) overlap the addresses [start, end)."""
        first = bisect_right(self.rows, start, key=itemgetter(1))
        return first, bisect_left(self.rows, end, lo=first, key=itemgetter(0))


FREES = (Kind.FREE_COMPLETED, Kind.FREE_REQUESTED, Kind.STORAGE_FREE)

BEFORE, AFTER = 0, 2
"""Whether an added event comes before or after the source's event with the same row, whose rank is 1."""


@dataclass(frozen=True, slots=True)
class _Event:
    """An event that the source does not have, or has at another place.

    `row` is the source's event beside which it is inserted.
    """

    row: int
    kind: Kind
    device: int
    address: int
    bytes: int
    stream: int
    pool: int


def simulated_trace(replays: Sequence[Replay]) -> MemoryTrace:
    """Return the source's trace with the replayed devices as simulated; other devices do not change.

    Addresses, rounded sizes, segments and reserved bytes are the simulator's; all else is the source's. The
    trace ends where the first device runs out of memory.

    Args:
        replays: at least one, each of a different device of the same trace.
    """
    return _Simulated(replays).trace()


class _Simulated:
    def __init__(self, replays: Sequence[Replay]) -> None:
        self._replays = replays
        self._source = replays[0].source
        self._end = min(replay.end for replay in replays)
        self._failures = [
            (replay, replay.failure)
            for replay in replays
            if replay.failure is not None and replay.end == self._end
        ]
        self._streams = list(self._source.streams)
        self._pools = list(self._source.pools)

    def trace(self) -> MemoryTrace:
        """Assemble the trace."""
        added = [event for replay in self._replays for event in self._added(replay)]
        kept = self._kept()
        anchor = np.concatenate((kept, np.array([event.row for event in added], np.int64)))
        rank = np.ones(len(anchor), np.int64)
        rank[len(kept) :] = [AFTER if event.kind == Kind.OOM else BEFORE for event in added]
        order = np.argsort(3 * anchor + rank, kind="stable")
        keys = (3 * anchor + rank)[order]
        events = self._events(kept, added, order)
        source = self._source
        return replace(
            source,
            source=f"{source.source}, simulated allocator",
            events=events,
            start=self._start(),
            devices=tuple(self._device(row) for row in range(len(source.devices))),
            segments=self._segments(),
            annotations=self._annotations(keys),
            streams=tuple(self._streams),
            pools=tuple(self._pools),
            ooms=self._ooms(events, keys),
            counters=at_every_moment(len(source.devices), Counter.SIMULATED),
            notes=(*source.notes, *self._notes()),
            properties={
                **{key: value for key, value in source.properties.items() if key not in OF_SETTINGS},
                "PYTORCH_CUDA_ALLOC_CONF": self._replays[0].settings.conf,
                "expandable_segments": str(self._replays[0].settings.expandable_segments),
            },
        )

    def _kept(self) -> Int64:
        """Return the rows of the source's events that are kept."""
        events = self._source.events
        kept = np.arange(len(events)) < self._end
        for replay in self._replays:
            mine = events.device == replay.device
            kept &= ~(mine & code_mask(SEGMENT_KINDS)[events.kind])
            kept &= ~(mine & code_mask(FREES)[events.kind] & (self._owner(replay) < 0))
            dropped = [row for _, row, _ in replay.early if row >= 0]
            kept[[*dropped, *replay.rescued]] = False
        return np.flatnonzero(kept)

    def _owner(self, replay: Replay) -> Int64:
        """Return, for each event, the row of `allocations` on a device that it allocates or frees, or -1."""
        blocks, events = self._source.allocations, self._source.events
        rows = np.flatnonzero(blocks.device == replay.device)
        free_rows = np.flatnonzero((events.device == replay.device) & code_mask(FREES)[events.kind])
        address = np.concatenate((blocks.address[rows], events.address[free_rows]))
        time = np.concatenate((blocks.born[rows], free_rows))
        order = np.lexsort((time, address))
        is_block = order < len(rows)
        last = np.maximum.accumulate(np.where(is_block, np.arange(len(order)), -1))
        owner = np.full(len(events), -1, np.int64)
        owner[blocks.born[rows][blocks.born[rows] >= 0]] = rows[blocks.born[rows] >= 0]
        free, before = order[~is_block] - len(rows), last[~is_block]
        block = rows[order[before]]
        mine = (before >= 0) & (blocks.address[block] == events.address[free_rows[free]])
        mine &= blocks.freed[block] >= free_rows[free]
        owner[free_rows[free[mine]]] = block[mine]
        return owner

    def _addresses(self, replay: Replay) -> UInt64:
        """Return the simulated address of each row of `allocations` on a device."""
        blocks, start = self._source.allocations, len(self._source.start)
        at_event = np.zeros(len(self._source.events), np.uint64)
        at_event[replay.allocations] = replay.address
        address = np.zeros(len(blocks), np.uint64)
        address[:start] = replay.start_address
        address[start:] = at_event[blocks.born[start:]]
        return address

    def _added(self, replay: Replay) -> list[_Event]:
        """Return the segment changes, the early frees, and the failure as events."""
        address, blocks = self._addresses(replay), self._source.allocations
        added = []
        for clock, _, recorded in replay.early:
            at_address = (blocks.address == recorded) & (blocks.device == replay.device)
            row = int(np.flatnonzero(at_address & (blocks.born < clock) & (blocks.freed > clock))[-1])
            numbers = (address[row], blocks.bytes[row], blocks.stream[row], blocks.pool[row])
            added.append(_Event(clock, Kind.FREE_COMPLETED, replay.device, *map(int, numbers)))
        for change in replay.changes:
            if 0 <= change.clock <= self._end:
                home = _row(self._streams, change.stream), _row(self._pools, change.pool)
                added.append(
                    _Event(change.clock, change.kind, replay.device, change.address, change.bytes, *home)
                )
        return added + [
            _Event(max(failure.event, 0), Kind.OOM, replay.device, 0, failure.requested_bytes, -1, -1)
            for failed, failure in self._failures
            if failed is replay
        ]

    def _events(self, kept: Int64, added: list[_Event], order: Int64) -> Events:
        source = self._source.events
        address, rounded = source.address.copy(), source.rounded.copy()
        for replay in self._replays:
            owner, placed = self._owner(replay), self._addresses(replay)
            mine = owner >= 0
            address[mine] = placed[owner[mine]]
            rounded[replay.allocations] = replay.rounded
        anchors = [min(event.row, len(source) - 1) for event in added]
        columns = {
            name: np.concatenate((getattr(source, name)[kept], getattr(source, name)[anchors]))
            for name in EVENT_DTYPES
        }
        columns["address"][: len(kept)], columns["rounded"][: len(kept)] = address[kept], rounded[kept]
        columns["rounded"][len(kept) :] = -1
        for name in ("kind", "device", "address", "bytes", "stream", "pool"):
            columns[name][len(kept) :] = [getattr(event, name) for event in added]
        columns = {name: column[order] for name, column in columns.items()}
        for replay in self._replays:
            self._level(replay, columns)
        return Events(**columns)

    @staticmethod
    def _level(replay: Replay, columns: dict[str, np.ndarray]) -> None:
        """Fill in the reserved bytes after each event of a device."""
        mine = columns["device"] == replay.device
        growth = RESERVE_SIGN[columns["kind"][mine]] * columns["bytes"][mine]
        columns["reserved"][mine] = replay.reserved[0] + np.cumsum(growth)

    def _start(self) -> StartState:
        start = self._source.start
        address, rounded = start.address.copy(), start.rounded.copy()
        for replay in self._replays:
            mine = start.device == replay.device
            address[mine], rounded[mine] = replay.start_address[mine], replay.start_rounded[mine]
        return replace(start, address=address, rounded=rounded)

    def _segments(self) -> Segments:
        """Return the segments before the first event: the recorded ones, and those that the start needed."""
        source = self._source.segments
        unreplayed = np.flatnonzero(~np.isin(source.device, [replay.device for replay in self._replays]))
        parts = [{field.name: getattr(source, field.name)[unreplayed] for field in fields(source)}]
        for replay in self._replays:
            ranges = Ranges()
            for row in np.flatnonzero(source.device == replay.device).tolist():
                start, size = int(source.address[row]), int(source.bytes[row])
                owner = int(source.stream[row]), int(source.pool[row]), int(source.expandable[row])
                ranges.add(start, start + size, owner)
            for change in replay.changes:
                if change.clock < 0 and change.kind in GROWS:
                    home = _row(self._streams, change.stream), _row(self._pools, change.pool)
                    end = change.address + change.bytes
                    ranges.add(change.address, end, (*home, int(change.kind == Kind.SEGMENT_MAP)))
                elif change.clock < 0:
                    ranges.remove(change.address, change.address + change.bytes)
            segments = [(replay.device, start, end - start, *owner) for start, end, owner in ranges.rows]
            columns = zip(*segments, strict=True) if segments else [[]] * len(fields(source))
            parts.append(
                {
                    field.name: np.array(column, getattr(source, field.name).dtype)
                    for field, column in zip(fields(source), columns, strict=True)
                }
            )
        return Segments(**{name: np.concatenate([part[name] for part in parts]) for name in parts[0]})

    def _annotations(self, keys: Int64) -> Annotations:
        """Return the source's annotations at the same moments; those after the end are left out."""
        annotations = self._source.annotations
        kept = annotations.event < self._end
        columns = {field.name: getattr(annotations, field.name)[kept] for field in fields(annotations)}
        columns["event"] = np.searchsorted(keys, 3 * columns["event"] + 1, side="right") - 1
        return Annotations(**columns)

    def _ooms(self, events: Events, keys: Int64) -> tuple[OutOfMemory, ...]:
        rescued = {row for replay in self._replays for row in replay.rescued}
        kept = [
            replace(oom, event=int(np.searchsorted(keys, 3 * oom.event + 1)))
            for oom in self._source.ooms
            if oom.event < self._end and oom.event not in rescued
        ]
        for replay, failure in self._failures:
            of_device = (events.kind == Kind.OOM) & (events.device == replay.device)
            free = None if replay.capacity is None else max(replay.capacity - failure.reserved_bytes, 0)
            kept.append(OutOfMemory(int(np.flatnonzero(of_device)[-1]), failure.requested_bytes, free))
        return tuple(sorted(kept, key=lambda oom: oom.event))

    def _device(self, row: int) -> Device:
        device = self._source.devices[row]
        for replay in self._replays:
            if replay.device == row:
                capacity = device.capacity if replay.capacity is None else replay.capacity
                return replace(device, reserved_at_start=int(replay.reserved[0]), capacity=capacity)
        return device

    def _notes(self) -> list[Note]:
        notes: list[Note] = []
        for replay in self._replays:
            name = self._source.devices[replay.device].name
            room = "" if replay.capacity is None else f" and a capacity of {replay.capacity:,} bytes"
            notes.append(
                Note(
                    f"{name}: addresses, segments and reserved memory are simulated, with the settings "
                    f"{replay.settings.conf or '(default)'!r}{room}.",
                    "simulated_allocator",
                    device=name,
                )
            )
            if replay.rescued:
                size = int(self._source.events.bytes[list(replay.rescued)].sum())
                notes.append(
                    Note(
                        f"{name}: {len(replay.rescued)} requests of {size:,} bytes that failed in the "
                        "recording found memory here; what the program would have done next is not known.",
                        "simulated_request",
                        size,
                        device=name,
                    )
                )
        return notes


def _row(table: list[T], value: T) -> int:
    """Return the row of a value in a table; add the value if it is missing."""
    if value not in table:
        table.append(value)
    return table.index(value)
