"""The final state of a device in a memory snapshot's form: segments that consist of blocks.

Recorded segments are kept if they agree with the blocks and the reserved bytes. Otherwise (on the CPU, or in
a profile without segments) they are made up around the live blocks, so that they sum to the reserved bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from tb_memplugin.analysis.layout import Layout, layout, pending_since, rounded_by_rule
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.tables import Bool, Int64

Json = dict[str, Any]
Frames = Callable[[int], list[Json]]
"""Returns the frames of a row of the trace's stacks (-1: no stack)."""

MOST = 1 << 62
"""A limit in bytes that no block reaches."""

ROOM_BEYOND = 1 << 46
"""Address space to keep free after the highest known address, for gaps and made-up segments."""

SLACK_GAP = 1 << 40
"""Distance of made-up addresses from all known ones, so large that they cannot be adjacent."""


@dataclass(frozen=True, slots=True)
class FinalSegments:
    """Segments at the end of the trace. `recorded`: whether they are all the allocator's own.

    `slack`: where made-up reserved memory begins, and how many bytes of it there are at the end.
    """

    segments: list[Json]
    recorded: bool
    slack: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Addresses:
    """An address for every row of `trace.allocations`, 0 for other devices' rows; and one beyond all of them.

    `made_up` counts the blocks for which the trace has no address, or one that cannot be right.
    """

    of: list[int]
    beyond: int
    made_up: int


def addresses_of(trace: MemoryTrace, device: int) -> Addresses:
    """Return the addresses of a device's blocks; made-up addresses are never used twice.

    Some sources give numbers that are no addresses (a memory timeline counts its tensors). If blocks that
    are alive together would overlap, all of the device's addresses are made up.
    """
    blocks = trace.allocations
    own = blocks.device == device
    has_address = own & (blocks.address != 0)
    if not all(_are_disjoint(trace, device, event) for event in (-1, len(trace.events) - 1)):
        has_address[:] = False
    made_up_bytes = int(rounded_by_rule(blocks.bytes[own & ~has_address]).sum())
    if _end(trace, has_address) + made_up_bytes > (1 << 64) - ROOM_BEYOND:
        has_address[:] = False
    top = _end(trace, has_address) // SLACK_GAP * SLACK_GAP + SLACK_GAP
    rows = np.flatnonzero(own & ~has_address)
    behind = np.cumsum(rounded_by_rule(blocks.bytes[rows]))
    address = np.where(has_address, blocks.address, np.uint64(0))
    address[rows[:1]] = top
    address[rows[1:]] = np.uint64(top) + behind[:-1].astype(np.uint64)
    beyond = top + (int(behind[-1]) if len(rows) else 0) + SLACK_GAP
    return Addresses(address.tolist(), beyond, len(rows))


def _end(trace: MemoryTrace, rows: Bool) -> int:
    """Return an address after the ends of all these blocks, 0 if there are none."""
    blocks = trace.allocations
    return int(blocks.address[rows].max(initial=0)) + int(blocks.bytes[rows].max(initial=0))


def _are_disjoint(trace: MemoryTrace, device: int, event: int) -> bool:
    """Return whether no two live blocks overlap."""
    blocks = trace.allocations
    rows = blocks.alive_at(event, device)
    rows = rows[blocks.address[rows] != 0]
    rows = rows[np.argsort(blocks.address[rows])]
    gap = np.diff(blocks.address[rows])
    return bool((gap >= blocks.bytes[rows[:-1]].astype(np.uint64)).all())


def final_reserve(trace: MemoryTrace, device: int) -> int | None:
    """Return the reserved bytes after the last event; None if nothing is reserved or it is not known."""
    if not trace.devices[device].has_reserved:
        return None
    reserved = trace.events.reserved[trace.events.device == device]
    reserved = reserved[reserved >= 0]
    return int(reserved[-1]) if len(reserved) else trace.devices[device].reserved_at_start


def final_segments(
    trace: MemoryTrace, device: int, number: int, address: Addresses, frames: Frames
) -> FinalSegments:
    """Return the segments and blocks of a device after the last event.

    Args:
        trace: any trace.
        device: row in `trace.devices`.
        number: the device's index in the snapshot.
        address: the addresses of the allocations.
        frames: returns the frames of a stack.
    """
    writer = _Writer(trace, device, number, address.of, frames)
    reserve = final_reserve(trace, device)
    at_end = layout(trace, device, len(trace.events) - 1)
    total = int(at_end.segments.bytes.sum())
    if (
        len(at_end.segments)
        and (reserve is None or total == reserve)
        and not len(at_end.misfits)
        and not address.made_up
    ):
        return FinalSegments(writer.recorded(at_end), True, (address.beyond, 0))
    if not reserve and not trace.live(device).any():
        return FinalSegments([], True, (address.beyond, 0))
    return writer.made_up(reserve, address.beyond)


class _Writer:
    def __init__(
        self, trace: MemoryTrace, device: int, number: int, address: list[int], frames: Frames
    ) -> None:
        self._trace = trace
        self._device = device
        self._number = number
        self._address = address
        self._frames = frames
        self._pending = pending_since(trace, device) < len(trace.events)

    def recorded(self, at_end: Layout) -> list[Json]:
        """Return the allocator's own segments, with their free stretches."""
        inside: list[list[Json]] = [[] for _ in range(len(at_end.segments))]
        live = (at_end.segment, at_end.rows, at_end.extent)
        for segment, row, extent in zip(*(column.tolist() for column in live), strict=True):
            inside[segment].append(self._live(row, extent))
        free = (at_end.free_segment, at_end.free_address, at_end.free_bytes)
        for segment, address, size in zip(*(column.tolist() for column in free), strict=True):
            inside[segment].append(_free(address, size))
        return [
            self._segment(*columns, blocks)
            for columns, blocks in zip(at_end.segments.rows(), inside, strict=True)
        ]

    def made_up(self, reserve: int | None, beyond: int) -> FinalSegments:
        """Make one segment for each run of adjacent live blocks, and a free one for the remaining reserve."""
        blocks = self._trace.allocations
        rows = blocks.alive_at(len(self._trace.events) - 1, self._device)
        rows = rows[np.argsort(np.array([self._address[row] for row in rows.tolist()], np.uint64))]
        extent = self._extents(rows, reserve)
        segments = self._runs(rows.tolist(), extent.tolist())
        block_bytes = int(extent.sum())
        target = max(block_bytes, int(self._trace.live(self._device).max())) if reserve is None else reserve
        slack = max(0, target - block_bytes)
        if slack:
            segments.append(self._segment(beyond, slack, -1, -1, True, [_free(beyond, slack)]))
        return FinalSegments(segments, False, (beyond, slack))

    def _extents(self, rows: np.ndarray, reserve: int | None) -> Int64:
        """Return the extent of each block: as recorded, else by the rounding rule if there is room."""
        blocks = self._trace.allocations
        size, recorded = blocks.bytes[rows], blocks.rounded[rows]
        cuda = self._trace.devices[self._device].has_reserved
        wanted = np.where(recorded >= 0, recorded, rounded_by_rule(size) if cuda else np.maximum(size, 1))
        if reserve is not None and int(wanted.sum()) > reserve:
            wanted = np.maximum(size, 1)
        address = [self._address[row] for row in rows.tolist()]
        room = [min(behind - before, MOST) for before, behind in pairwise(address)]
        limit = np.array([*room, MOST][: len(rows)], np.int64)
        extent: Int64 = np.maximum(np.minimum(wanted, limit), np.minimum(size, wanted))
        return extent

    def _runs(self, rows: list[int], extents: list[int]) -> list[Json]:
        runs: list[list[Json]] = []
        owners: list[int] = []
        end = -1
        for row, extent in zip(rows, extents, strict=True):
            if self._address[row] != end:
                runs.append([])
                owners.append(row)
            runs[-1].append(self._live(row, extent))
            end = self._address[row] + extent
        blocks = self._trace.allocations
        return [
            self._segment(
                run[0]["address"],
                sum(block["size"] for block in run),
                int(blocks.stream[owner]),
                int(blocks.pool[owner]),
                False,
                run,
            )
            for run, owner in zip(runs, owners, strict=True)
        ]

    def _live(self, row: int, extent: int) -> Json:
        blocks = self._trace.allocations
        return {
            "address": self._address[row],
            "size": extent,
            "requested_size": int(blocks.bytes[row]),
            "state": "active_pending_free" if self._pending[row] else "active_allocated",
            "frames": self._frames(int(blocks.stack[row])),
        }

    def _segment(
        self, address: int, size: int, stream: int, pool: int, expandable: bool, blocks: list[Json]
    ) -> Json:
        blocks.sort(key=lambda block: int(block["address"]))
        live = [block for block in blocks if block["state"] != "inactive"]
        allocated = [block for block in live if block["state"] == "active_allocated"]
        return {
            "device": self._number,
            "address": address,
            "total_size": size,
            "allocated_size": sum(block["size"] for block in allocated),
            "active_size": sum(block["size"] for block in live),
            "requested_size": sum(block["requested_size"] for block in live),
            "stream": self._trace.streams[stream] if stream >= 0 else 0,
            "segment_type": "small" if size == 2 << 20 else "large",
            **({"segment_pool_id": tuple(self._trace.pools[pool])} if pool >= 0 else {}),
            "is_expandable": bool(expandable),
            "frames": [],
            "blocks": blocks,
        }


def _free(address: int, size: int) -> Json:
    return {"address": address, "size": size, "requested_size": 0, "state": "inactive", "frames": []}
