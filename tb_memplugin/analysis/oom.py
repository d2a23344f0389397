"""Out-of-memory errors: the request, what was free, and why the request failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tb_memplugin.analysis.allocator import AllocatorHistory, PoolState
from tb_memplugin.analysis.divisions import Part, parts_of
from tb_memplugin.analysis.layout import Layout
from tb_memplugin.analysis.pool_names import NOT_KNOWN, pool_name, stream_name
from tb_memplugin.analysis.units import size_text
from tb_memplugin.errors import NotRecordedError
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.allocator import SMALL_REQUEST, new_segment_bytes
from tb_memplugin.trace.result import AnalysisResult
from tb_memplugin.trace.tables import Bool

Cause = Literal["full", "fragmented", "elsewhere", "limit", "not split", "unknown"]
"""full: all free memory together is less than the request. fragmented: enough memory is free, but not in
one piece. elsewhere: enough is free, but in other pools, streams or size classes. limit: the device had
enough; the process was not allowed more. not split: a free block is large enough, but the allocator may
not use it for this request. unknown: the segments, or the free bytes of the device, are not known."""


@dataclass(frozen=True, slots=True)
class OomReport(AnalysisResult):
    """A request that failed, and the state of its device at that event. Sizes are bytes, None if not known.

    Attributes:
        number: row in `trace.ooms`.
        event, time_ns: the event that records the failure.
        requested_bytes: as the file records it; a snapshot has the request rounded up to 512 bytes.
        new_segment_bytes: the segment that the allocator would have had to take from the device, by rule.
        free_bytes: free on the device, outside the memory that this allocator has reserved.
        reserved_bytes, active_bytes, pending_bytes: as in `Levels`.
        pool, stream: the pool and stream of the request.
        reserve_free_bytes: free in the reserved segments of all pools.
        usable_free_bytes, largest_usable_bytes: the part of them that this request could use, and its
            longest stretch.
        largest_free_bytes: the longest free stretch in any pool.
        cause, why: the reason for the failure, as a word and as a sentence.
        parts, stacks: the live memory by category and by stack; each sums to `active_bytes`.
    """

    number: int
    device: str
    event: int
    time_ns: int
    requested_bytes: int
    new_segment_bytes: int
    free_bytes: int | None
    reserved_bytes: int | None
    active_bytes: int
    pending_bytes: int
    pool: str
    stream: str
    reserve_free_bytes: int | None
    usable_free_bytes: int | None
    largest_usable_bytes: int | None
    largest_free_bytes: int | None
    cause: Cause
    why: str
    parts: tuple[Part, ...]
    stacks: tuple[Part, ...]
    pools: tuple[PoolState, ...]


@dataclass(frozen=True, slots=True)
class _Room:
    """Free bytes on the device and in the reserved segments; None if not known."""

    on_device: int | None
    in_all: int | None = None
    usable: int | None = None
    largest: int | None = None
    largest_usable: int | None = None


def oom_report(trace: MemoryTrace, number: int = 0) -> OomReport:
    """Return the report of a failed request.

    Args:
        number: row in `trace.ooms`.

    Raises:
        NotRecordedError: the trace has no such failed request.
        UnreadableFileError: the segment events contradict each other beyond what can be replayed.
    """
    if not 0 <= number < len(trace.ooms):
        raise NotRecordedError(
            f"The trace has no out-of-memory event {number}.",
            where=trace.source,
            fix=f"Choose one below {len(trace.ooms)}."
            if trace.ooms
            else "No request failed while it was recorded.",
        )
    return _report(trace, number, AllocatorHistory(trace, int(trace.events.device[trace.ooms[number].event])))


def failed_requests(trace: MemoryTrace, device: int) -> list[int]:
    """Return the rows in `trace.ooms` of a device's failed requests, in event order."""
    events = np.array([oom.event for oom in trace.ooms], np.int64)
    rows: list[int] = np.flatnonzero(trace.events.device[events] == device).tolist()
    return rows


def oom_reports(trace: MemoryTrace, device: int, rows: Sequence[int]) -> tuple[OomReport, ...]:
    """Return the reports of several failed requests of one device, faster than one by one.

    Args:
        rows: some of `failed_requests`.

    Raises:
        UnreadableFileError: the segment events contradict each other beyond what can be replayed.
    """
    if not rows:
        return ()
    history = AllocatorHistory(trace, device)
    return tuple(_report(trace, row, history) for row in rows)


def _report(trace: MemoryTrace, number: int, history: AllocatorHistory) -> OomReport:
    failed = trace.ooms[number]
    event, device = failed.event, int(trace.events.device[failed.event])
    memory, placed = history.levels, history.placement.at(event)
    room = (
        _room(trace, event, placed, failed.requested_bytes, failed.free_bytes)
        if history.knows_segments
        else _Room(failed.free_bytes)
    )
    alive = trace.allocations.alive_at(event, device)
    active = int(memory.active[event + 1])
    reserved = None if memory.reserved is None else int(memory.reserved[event + 1])
    pool = pool_name(trace, int(trace.events.pool[event]))
    stream = stream_name(trace, int(trace.events.stream[event]))
    new_segment = new_segment_bytes(failed.requested_bytes)
    cause = _cause(failed.requested_bytes, new_segment, room)
    return OomReport(
        number=number,
        device=trace.devices[device].name,
        event=event,
        time_ns=int(trace.events.time_ns[event]),
        requested_bytes=failed.requested_bytes,
        new_segment_bytes=new_segment,
        free_bytes=failed.free_bytes,
        reserved_bytes=reserved,
        active_bytes=active,
        pending_bytes=int(memory.pending[event + 1]),
        pool=pool,
        stream=stream,
        reserve_free_bytes=room.in_all,
        usable_free_bytes=room.usable,
        largest_usable_bytes=room.largest_usable,
        largest_free_bytes=room.largest,
        cause=cause,
        why=_why(cause, failed.requested_bytes, new_segment, active, reserved, room, _home(pool, stream)),
        parts=parts_of(trace, alive, "category"),
        stacks=parts_of(trace, alive, "stack"),
        pools=history.pools(trace, event, placed),
    )


def _room(trace: MemoryTrace, event: int, placed: Layout, request: int, on_device: int | None) -> _Room:
    usable = placed.free_bytes[_usable(trace, event, placed, request)[placed.free_segment]]
    return _Room(
        on_device,
        in_all=int(placed.free_bytes.sum()),
        usable=int(usable.sum()),
        largest=int(placed.free_bytes.max(initial=0)),
        largest_usable=int(usable.max(initial=0)),
    )


def _usable(trace: MemoryTrace, event: int, placed: Layout, request: int) -> Bool:
    """Return the mask of segments that fit the request's pool, stream and size; unknown values fit."""
    segments = placed.segments
    fits_home = np.ones(len(segments), bool)
    for requested, column in (
        (trace.events.pool[event], segments.pool),
        (trace.events.stream[event], segments.stream),
    ):
        fits_home &= (requested < 0) | (column < 0) | (column == requested)
    fits: Bool = fits_home & (segments.expandable | (segments.small == (request <= SMALL_REQUEST)))
    return fits


def _cause(request: int, new_segment: int, room: _Room) -> Cause:
    """Return the cause. What alone would have been enough to serve the request is tried first."""
    if room.on_device is not None and room.on_device >= new_segment:
        return "limit"
    if room.in_all is None or room.usable is None or room.largest is None or room.largest_usable is None:
        return "unknown"
    if room.largest_usable >= request:
        return "not split"
    if room.largest >= request:
        return "elsewhere"
    outside = room.on_device or 0
    if room.usable + outside >= request:
        return "fragmented"
    if room.in_all + outside >= request:
        return "elsewhere"
    return "unknown" if room.on_device is None else "full"


def _why(
    cause: Cause, request: int, new_segment: int, active: int, reserved: int | None, room: _Room, home: str
) -> str:
    usage = f"PyTorch uses {size_text(active)}"
    if reserved is not None and reserved >= active:  # less: the record contradicts itself
        usage += f" of the {size_text(reserved)} that it has reserved"
    need = f"The request needs one free block of {size_text(request)}{home}"
    return f"{usage}. {need}{_largest(room)}. {_device(room)}. {_verdict(cause, request, new_segment, room)}"


def _largest(room: _Room) -> str:
    if room.usable is None or room.largest_usable is None:
        return ""
    return (
        f"; the largest block that it could use has {size_text(room.largest_usable)}, of "
        f"{size_text(room.usable)} free in all"
    )


def _device(room: _Room) -> str:
    if room.on_device is None:
        return "How much the device had free is not known"
    return f"The device had {size_text(room.on_device)} free"


def _verdict(cause: Cause, request: int, new_segment: int, room: _Room) -> str:
    outside, usable, in_all = room.on_device or 0, room.usable or 0, room.in_all or 0
    if cause == "limit":
        return (
            f"The device had room for the new segment of {size_text(new_segment)}: either a limit on this "
            "process (set_per_process_memory_fraction) refused it, or another process freed memory in "
            "between."
        )
    if cause == "not split":
        return (
            "The allocator may not use that block for this request: either max_split_size_mb forbids "
            "splitting it, or the request is rounded up to more than it has (roundup_power2_divisions)."
        )
    if cause == "elsewhere":
        elsewhere = in_all - usable
        return (
            f"Enough memory is free, but {size_text(elsewhere)} of it belongs to other pools, streams "
            "or size classes."
        )
    if cause == "fragmented":
        return "Fragmentation: enough memory is free, but not in one piece."
    if cause == "full":
        missing = request - outside - in_all
        return f"Memory is full: all free memory together is {size_text(missing)} less than the request."
    return "The recording does not show why the request failed."


def _home(pool: str, stream: str) -> str:
    where = f" in the {pool} pool" if pool != NOT_KNOWN else ""
    if stream == NOT_KNOWN:
        return where
    return f"{where} for {'the ' if stream == 'default stream' else ''}{stream}"
