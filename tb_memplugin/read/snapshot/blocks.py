"""Read the final state in a memory snapshot: reserved bytes and live blocks of every device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from tb_memplugin.read.faults import Faults, Tally
from tb_memplugin.read.snapshot.numbers import addresses, whole_numbers
from tb_memplugin.read.snapshot.tables import Tables
from tb_memplugin.trace.tables import MOST_BYTES, Bool, Int32, Int64, UInt8, UInt64

LIVE_STATES = frozenset({"active_allocated", "active_pending_free", "active_awaiting_free"})
"""The states of live blocks. A block whose free waits for another stream is still live. The third state
occurs only in PyTorch's docstring."""

HIGHEST_DEVICE = 1 << 16
"""Device numbers must be below this."""

ALLOCATED = "active_allocated"
STATES = LIVE_STATES | {"inactive"}

NUMBER = "a size or an address of a block"
NO_SIZE = "the segments sum to no possible size"
NO_SEGMENT = "a segment has a negative size, or ends beyond the last address"


@dataclass(frozen=True, slots=True)
class FinalSegments:
    """The segments of one device when the snapshot was taken; `stream` and `pool` are rows, -1 for none."""

    address: UInt64
    bytes: Int64
    stream: Int32
    pool: Int32
    expandable: UInt8


@dataclass(frozen=True, slots=True)
class FinalState:
    """The state of one device when the snapshot was taken.

    `reserved` is the sum of all segments' `total_size` in bytes. The columns describe the live blocks:
    `bytes` are the requested bytes, `rounded` those that the allocator used; `pending` is 1 for blocks
    whose free waits for a stream; `stack` is where they were allocated, `stream` and `pool` are those of
    their segment. `faults` has each kind of contradiction. `recorded` is False if the snapshot does not
    contain the state of any device; the columns are then empty. `requested` is the sum of what the
    allocator counts as requested in each segment, None if it does not.
    """

    reserved: int
    segments: FinalSegments
    address: UInt64
    bytes: Int64
    rounded: Int64
    pending: UInt8
    stack: Int32
    stream: Int32
    pool: Int32
    faults: Faults
    recorded: bool = True
    requested: int | None = None


def no_state(recorded: bool) -> FinalState:
    """Return the final state of a device without segments, or of one whose segments are not known."""
    return replace(_state_of([], Tables()), recorded=recorded)


def final_states(
    segments: Sequence[dict[str, Any]], tables: Tables, device: int | None = None
) -> dict[int, FinalState]:
    """Return the final state of each device that has segments.

    In old versions blocks have no address: they follow one another in the segment without gaps. If there is
    no requested size (PyTorch before 2.0), the newest `history` entry has it as `real_size`; if that is
    missing too, the rounded size is used and counted as a fault.

    Args:
        segments: as PyTorch writes them (schema: docstring of `torch.cuda.memory._snapshot`).
        tables: the tables to which the blocks' stacks, streams and pools are added.
        device: the number of the device of all segments, if they do not contain it.

    Raises:
        KeyError, TypeError, ValueError, AttributeError, OverflowError: a field is missing or invalid.
    """
    shared = len(segments) - len({id(segment["blocks"]) for segment in segments if segment["blocks"]})
    if shared > sum(not segment["blocks"] for segment in segments):
        raise ValueError("segments share one list of blocks")
    devices: dict[int, list[dict[str, Any]]] = {}
    for segment in segments:
        number = segment["device"] if device is None else device
        if type(number) is not int or not 0 <= number < HIGHEST_DEVICE:
            shown = number if type(number) is int and abs(number) < MOST_BYTES else type(number).__name__
            raise ValueError(f"the device of a segment is {shown!r}")
        devices.setdefault(number, []).append(segment)
    return {number: _state_of(own, tables) for number, own in sorted(devices.items())}


class _Blocks:
    """The blocks of one device's segments as columns: their rounded sizes, and each one's segment."""

    def __init__(self, segments: list[dict[str, Any]], begin: UInt64) -> None:
        lists = [segment["blocks"] for segment in segments]
        written = list(chain.from_iterable(lists))
        state = [block["state"] for block in written]
        for kind in set(map(type, state)) - {str}:
            raise TypeError(f"the state of a block is {kind.__name__}")
        self.segment = np.repeat(np.arange(len(segments)), list(map(len, lists)))
        self.size = _sizes([block["size"] for block in written])
        self.is_live = np.array([name in LIVE_STATES for name in state], bool)
        self.is_allocated = np.array([name == ALLOCATED for name in state], bool)
        self.is_foreign = np.array([name not in STATES for name in state], bool)
        self.live = [written[row] for row in np.flatnonzero(self.is_live).tolist()]
        self.end = begin.copy()
        self.address, self.apart = self._follow(written, begin)

    def _follow(self, written: list[dict[str, Any]], begin: UInt64) -> tuple[UInt64, np.ndarray]:
        """Return each block's address, and how many bytes of each segment's blocks overlap or lie between."""
        size = self.size.view(np.uint64)
        is_known = np.array(["address" in block for block in written], bool)
        is_first = np.diff(self.segment, prepend=-1) > 0
        address = begin[self.segment]
        address[is_known] = addresses([block["address"] for block in written if "address" in block], NUMBER)
        before = np.cumsum(size) - size
        last = np.maximum.accumulate(np.where(is_known | is_first, np.arange(len(size)), 0))
        address = address[last] + (before - before[last])
        self.end[self.segment] = address + size
        gap = address - np.where(is_first, begin[self.segment], np.roll(address + size, 1))
        apart = np.minimum(gap, -gap) + np.maximum(-self.size, 0)
        return address, np.bincount(self.segment, apart, len(begin))

    def sums(self, size: Int64, rows: Bool) -> Int64:
        """Return the sum of some blocks' sizes in each segment: int64, shape (segments,)."""
        sums = np.zeros(len(self.end), np.int64)
        np.add.at(sums, self.segment[rows], size)
        return sums


def _state_of(segments: list[dict[str, Any]], tables: Tables) -> FinalState:
    """Return the final state of one device."""
    columns = _segments(segments, tables)
    blocks = _Blocks(segments, columns.address)
    requested = [_requested(block) for block in blocks.live]
    rounded = blocks.size[blocks.is_live]
    is_missing = np.array([size is None for size in requested], bool)
    filled = zip(requested, rounded.tolist(), strict=True)
    size = _sizes([other if size is None else size for size, other in filled])
    reserved = sum(columns.bytes.tolist())
    if reserved >= MOST_BYTES:
        raise OverflowError(NO_SIZE)
    address = blocks.address[blocks.is_live]
    order = np.argsort(address)
    # Addresses are compared by distance: a sum near 2**64 would wrap.
    gap = np.diff(address[order])
    room = np.maximum(rounded[order][:-1], 0).astype(np.uint64)
    overlap = gap < room
    counted, is_counted = _counters(segments, "requested_size")
    disagree = np.where(is_counted, counted - blocks.sums(size, blocks.is_live), 0)
    faults = {
        "live blocks have a negative size; counted as 0": Tally.of(size < 0, size),
        "live blocks overlap": Tally(int(overlap.sum()), int((room - gap)[overlap].sum())),
        "live blocks are larger than the space that the allocator gave them": Tally.of(
            size > rounded, size - rounded
        ),
        "segments do not have the sum of their blocks' requested sizes": Tally.of(disagree != 0, disagree),
        **_disagreements(segments, columns, blocks),
        "blocks are in an unknown state; taken as free": Tally.of(blocks.is_foreign, blocks.size),
        "live blocks have no requested size; their rounded size is used": Tally.of(is_missing, rounded),
    }
    owner = blocks.segment[blocks.is_live]
    return FinalState(
        reserved=reserved,
        segments=columns,
        address=address,
        bytes=np.maximum(size, 0),
        rounded=np.maximum(rounded, 0),
        pending=(~blocks.is_allocated[blocks.is_live]).astype(np.uint8),
        stack=tables.stacks.rows([_frames(block) for block in blocks.live]),
        stream=columns.stream[owner],
        pool=columns.pool[owner],
        faults=faults,
        requested=int(counted.sum()) if is_counted.all() else None,
    )


def _disagreements(segments: list[dict[str, Any]], columns: FinalSegments, blocks: _Blocks) -> Faults:
    """Compare segments with their blocks, but those of hand-made snapshots, which may be incomplete."""
    active, is_whole = _counters(segments, "active_size")
    allocated, is_counted = _counters(segments, "allocated_size")
    of_allocated = blocks.sums(blocks.size[blocks.is_allocated], blocks.is_allocated)
    other = np.maximum(
        np.abs(active - blocks.sums(blocks.size[blocks.is_live], blocks.is_live)),
        np.where(is_counted, np.abs(allocated - of_allocated), 0),
    )
    filled = (blocks.end - columns.address).view(np.int64)
    unfilled = blocks.apart + np.abs(columns.bytes - filled)
    return {
        "segments are not completely filled by their blocks": Tally.of(is_whole & (unfilled != 0), unfilled),
        "segments do not have the sums of their blocks' sizes": Tally.of(is_whole & (other != 0), other),
    }


def _counters(segments: list[dict[str, Any]], field: str) -> tuple[Int64, Bool]:
    """Return what the allocator counts in each segment, 0 where it does not, and where it does."""
    written = [segment.get(field) for segment in segments]
    is_counted = np.array([size is not None for size in written], bool)
    return _sizes([0 if size is None else size for size in written]), is_counted


def _sizes(written: list[Any]) -> Int64:
    """Return sizes whose sum, without signs, fits an int64."""
    sizes = whole_numbers(written, NUMBER)
    if float(np.abs(sizes.astype(np.float64)).sum()) >= MOST_BYTES:
        raise OverflowError(NO_SIZE)
    return sizes


def _requested(block: dict[str, Any]) -> Any:
    size = block.get("requested_size")
    return block["history"][0].get("real_size") if size is None and block.get("history") else size


def _frames(block: dict[str, Any]) -> Any:
    history = block.get("history")
    return history[0].get("frames") if history else block.get("frames")


def _segments(segments: list[dict[str, Any]], tables: Tables) -> FinalSegments:
    address = addresses([segment["address"] for segment in segments], "address")
    size = whole_numbers([segment["total_size"] for segment in segments], "total_size")
    if bool(((size < 0) | (size.view(np.uint64) > ~address)).any()):
        raise OverflowError(NO_SEGMENT)
    return FinalSegments(
        address=address,
        bytes=size,
        stream=tables.stream_rows([segment.get("stream") for segment in segments]),
        pool=tables.pool_rows([segment.get("segment_pool_id") for segment in segments]),
        expandable=np.asarray([bool(segment.get("is_expandable")) for segment in segments], np.uint8),
    )
