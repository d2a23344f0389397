"""Read the final state in a memory snapshot: reserved bytes and live blocks of every device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tb_memplugin.read.faults import Faults, Tally
from tb_memplugin.read.snapshot.numbers import addresses, whole_numbers
from tb_memplugin.read.snapshot.tables import Tables
from tb_memplugin.trace.tables import MOST_BYTES, Int32, Int64, UInt8, UInt64

LIVE_STATES = frozenset({"active_allocated", "active_pending_free", "active_awaiting_free"})
"""The states of live blocks. A block whose free waits for another stream is still live. The third state
occurs only in PyTorch's docstring."""

HIGHEST_DEVICE = 1 << 16
"""Device numbers must be below this."""

STATES = LIVE_STATES | {"inactive"}

MOST_NUMBER = 1 << 63
"""Addresses are below twice this and at least minus this: the C++ pickler writes high ones as negative."""


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


@dataclass(slots=True)
class _Device:
    segments: list[dict[str, Any]] = field(default_factory=list)
    address: list[int] = field(default_factory=list)
    requested: list[int] = field(default_factory=list)
    rounded: list[int] = field(default_factory=list)
    pending: list[bool] = field(default_factory=list)
    frames: list[Any] = field(default_factory=list)
    segment: list[int] = field(default_factory=list)
    counted: int | None = 0
    disagree: Tally = field(default_factory=Tally)
    unfilled: Tally = field(default_factory=Tally)
    other_sizes: Tally = field(default_factory=Tally)
    without_request: Tally = field(default_factory=Tally)
    foreign_states: Tally = field(default_factory=Tally)


def no_state(recorded: bool) -> FinalState:
    """Return the final state of a device without segments, or of one whose segments are not known."""
    return replace(_columns(_Device(), Tables()), recorded=recorded)


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
    devices: dict[int, _Device] = {}
    for segment in segments:
        number = segment["device"] if device is None else device
        if type(number) is not int or not 0 <= number < HIGHEST_DEVICE:
            shown = number if type(number) is int and abs(number) < MOST_BYTES else type(number).__name__
            raise ValueError(f"the device of a segment is {shown!r}")
        _add(devices.setdefault(number, _Device()), segment)
    return {number: _columns(device, tables) for number, device in sorted(devices.items())}


def _add(device: _Device, segment: dict[str, Any]) -> None:
    at = begin = _number(segment["address"])
    requested: list[int] = []
    of_state = dict.fromkeys(STATES, 0)
    apart = 0
    for block in segment["blocks"]:
        state, size, address = block["state"], _number(block["size"]), _number(block.get("address", at))
        if type(state) is not str:
            raise TypeError(f"the state of a block is {type(state).__name__}")
        if state in LIVE_STATES:
            device.address.append(address)
            device.rounded.append(size)
            requested.append(_requested(device, block))
            device.pending.append(state != "active_allocated")
            device.frames.append(_frames(block))
            device.segment.append(len(device.segments))
        elif state not in STATES:
            device.foreign_states.add(size)
        of_state[state] = of_state.get(state, 0) + size
        apart += abs(address - at) + max(-size, 0)
        at = address + size
    device.segments.append(segment)
    device.requested += requested
    requested_size = segment.get("requested_size")
    if device.counted is not None:
        device.counted = None if requested_size is None else device.counted + _number(requested_size)
    if requested_size is not None and requested_size != sum(requested):
        device.disagree.add(_number(requested_size) - sum(requested))
    if segment.get("active_size") is not None:  # not in hand-made snapshots, which may be incomplete
        apart += abs(_number(segment["total_size"]) - (at - begin))
        if apart:
            device.unfilled.add(apart)
        if other := _other_sizes(segment, of_state):
            device.other_sizes.add(other)


def _other_sizes(segment: dict[str, Any], of_state: dict[str, int]) -> int:
    """Return by how many bytes a segment's sizes differ from the sums of its blocks' sizes."""
    allocated, active = of_state["active_allocated"], sum(of_state[state] for state in LIVE_STATES)
    sizes = _number(segment["active_size"]), _number(segment.get("allocated_size", allocated))
    return max(abs(sizes[0] - active), abs(sizes[1] - allocated))


def _number(value: Any) -> int:
    """Return a size or address if it is valid: sums of other values could take forever, or all memory."""
    if type(value) is not int or not -MOST_NUMBER <= value < 2 * MOST_NUMBER:
        fault = "out of range" if type(value) is int else type(value).__name__
        raise TypeError(f"a size or an address of a block is {fault}")
    return value


def _requested(device: _Device, block: dict[str, Any]) -> int:
    size = block.get("requested_size")
    if size is None and block.get("history"):
        size = block["history"][0].get("real_size")
    if size is None:
        size = block["size"]
        device.without_request.add(_number(size))
    return _number(size)


def _frames(block: dict[str, Any]) -> Any:
    history = block.get("history")
    return history[0].get("frames") if history else block.get("frames")


def _columns(device: _Device, tables: Tables) -> FinalState:
    address, size = addresses(device.address, "address"), whole_numbers(device.requested, "size")
    rounded = whole_numbers(device.rounded, "size")
    segments = _segments(device.segments, tables)
    reserved = sum(segments.bytes.tolist())
    total = float(np.sum(np.abs(size), dtype=np.float64))
    if bool((segments.bytes < 0).any()) or reserved >= MOST_BYTES or total >= MOST_BYTES:
        raise OverflowError("the segments sum to no possible size")
    order = np.argsort(address)
    # Addresses are compared by distance: a sum near 2**64 would wrap.
    gap = np.diff(address[order])
    room = np.maximum(rounded[order][:-1], 0).astype(np.uint64)
    overlap = gap < room
    faults = {
        "live blocks have a negative size; counted as 0": Tally.of(size < 0, size),
        "live blocks overlap": Tally(int(overlap.sum()), int((room - gap)[overlap].sum())),
        "live blocks are larger than the space that the allocator gave them": Tally.of(
            size > rounded, size - rounded
        ),
        "segments do not have the sum of their blocks' requested sizes": device.disagree,
        "segments are not completely filled by their blocks": device.unfilled,
        "segments do not have the sums of their blocks' sizes": device.other_sizes,
        "blocks are in an unknown state; taken as free": device.foreign_states,
        "live blocks have no requested size; their rounded size is used": device.without_request,
    }
    owner = np.asarray(device.segment, np.int64)
    return FinalState(
        reserved=reserved,
        segments=segments,
        address=address,
        bytes=np.maximum(size, 0),
        rounded=np.maximum(rounded, 0),
        pending=np.asarray(device.pending, np.uint8),
        stack=tables.stacks.rows(device.frames),
        stream=segments.stream[owner],
        pool=segments.pool[owner],
        faults=faults,
        requested=device.counted,
    )


def _segments(segments: list[dict[str, Any]], tables: Tables) -> FinalSegments:
    return FinalSegments(
        address=addresses([segment["address"] for segment in segments], "address"),
        bytes=whole_numbers([segment["total_size"] for segment in segments], "total_size"),
        stream=tables.stream_rows([segment.get("stream") for segment in segments]),
        pool=tables.pool_rows([segment.get("segment_pool_id") for segment in segments]),
        expandable=np.asarray([bool(segment.get("is_expandable")) for segment in segments], np.uint8),
    )
