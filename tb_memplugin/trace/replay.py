"""Replay: which free ends which allocation, and how many bytes are live after each event."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Generic, TypeVar, cast

import numpy as np

from tb_memplugin.trace.indexes import INDEXED, Alive, Lifetimes, left
from tb_memplugin.trace.kinds import Kind, Phase
from tb_memplugin.trace.tables import (
    PIECE,
    Bool,
    Events,
    Int32,
    Int64,
    Rows,
    StartState,
    UInt8,
    UInt64,
    code_mask,
    pieces_of,
)

Column = TypeVar("Column")


class _Joined(Generic[Column]):
    """A column of all blocks: that of the start state, then that of the events which allocated.

    It is made when it is first asked for. `at_start` stands in for columns that the start state lacks.
    """

    def __init__(self, at_start: int | None = None) -> None:
        self._at_start = at_start
        self._name = ""

    def __set_name__(self, owner: type[Allocations], name: str) -> None:
        self._name = name

    def __get__(self, blocks: Allocations, owner: type[Allocations]) -> Column:
        events, start = blocks._events, blocks._start  # noqa: SLF001
        values = getattr(events, self._name)
        if self._at_start is None:
            before = getattr(start, self._name)
        else:
            before = np.full(len(start), self._at_start, values.dtype)
        born = blocks.born[len(start) :]
        if len(born) <= PIECE:
            column = np.concatenate((before, values[born]))
        elif values.strides == (0,) and (before == values[0]).all():
            column = np.broadcast_to(values[:1], len(blocks))  # one value, which takes no memory
        else:
            column = events.kept(
                lambda: chain((before,), (values[born[rows]] for rows in pieces_of(len(born))))
            )
        vars(blocks)[self._name] = column  # found there from now on
        return cast(Column, column)


@dataclass(frozen=True, eq=False)
class Allocations:
    """One row per block that was ever alive: blocks of the start state, then alloc events in order.

    `born` is the index of the alloc event, -1 for the start state; `freed` is the index of the event that
    freed the block, or the number of events if none did. A block is live after event e if
    born <= e < freed. `bytes` are the requested bytes, `rounded` those that the allocator used for the
    block, -1 if not known. The other columns are those of `Events` at the allocation. `unseen_frees` counts
    blocks whose address was allocated again although no free was reported (the free ran on a thread that
    was not profiled); `unmatched_frees` are the indices of reported frees of blocks not known to be alive.
    """

    born: Int64
    freed: Int64
    unseen_frees: int
    unmatched_frees: Int64
    _events: Events = field(repr=False)
    _start: StartState = field(repr=False)

    device = _Joined[UInt8]()
    address = _Joined[UInt64]()
    bytes = _Joined[Int64]()
    category = _Joined[UInt8]()
    module = _Joined[Int32]()
    operator = _Joined[Int32](-1)
    label = _Joined[Int32]()
    stack = _Joined[Int32]()
    phase = _Joined[UInt8](Phase.BEFORE)
    stream = _Joined[Int32]()
    pool = _Joined[Int32]()
    context = _Joined[Int32](-1)
    forward = _Joined[Int32](-1)
    rounded = _Joined[Int64]()
    reason = _Joined[UInt8]()
    module_confidence = _Joined[UInt8]()
    tensor = _Joined[Int32]()

    def __len__(self) -> int:
        return len(self.born)

    @cached_property
    def _lifetimes(self) -> Lifetimes:
        return Lifetimes(self.born, self.freed)

    @cached_property
    def freed_by(self) -> Int32:
        """The row of the block that each event freed, -1 if none: int32, shape (events,)."""
        rows = np.full(len(self._events) + 2, -1, np.int32)
        for piece in pieces_of(len(self)):
            rows[self.freed[piece]] = np.arange(piece.start, piece.stop, dtype=np.int32)
        return self._events.kept(
            lambda: (rows[:-2],)
        )  # the last two: of blocks that outlive the window, and of those without a life

    def alive_at(self, event: int, device: int) -> Rows:
        """Return the rows of the blocks on a device that are live after an event, ascending."""
        if len(self) < INDEXED:
            early = slice(0, int(np.searchsorted(self.born, event, side="right")))
            rows: Rows = np.flatnonzero((self.freed[early] > event) & (self.device[early] == device))
            return rows
        return np.sort(self.alive_after(np.array([event], np.int64), device).rows)

    def of_device(self, device: int, event: int | None) -> Rows:
        """Return the rows of a device: those live after an event; None: all that were made in the trace."""
        if event is not None:
            return self.alive_at(event, device)
        return np.flatnonzero((self.device == device) & (self.born >= 0))

    def alive_between(self, first: int, end: int, device: int) -> Rows:
        """Return the rows of the blocks on a device that were live between the events first and end."""
        rows: Rows = np.flatnonzero((self.device == device) & (self.born < end) & (self.freed >= first))
        return rows

    def alive_after(self, events: Int64, device: int) -> Alive:
        """Return the blocks on a device that are live after any of some events, in no order.

        Args:
            events: int64, shape (n,), n from 1, ascending, from -1.
            device: row in the trace's devices.
        """
        if len(self) < INDEXED:
            early = slice(0, int(np.searchsorted(self.born, events[-1], side="right")))
            near = np.flatnonzero((self.freed[early] > events[0]) & (self.device[early] == device))
            first, freed = np.searchsorted(events, self.born[near]).astype(np.int32), self.freed[near]
            is_alive = events[first] < freed
            first = first[is_alive]
            return Alive(near[is_alive], first, left(freed[is_alive], first, events + 1))
        alive = self._lifetimes.alive_at(events + 1)
        return alive.of(self.device[alive.rows] == device)


def match_frees(address: UInt64, device: UInt8, is_alloc: Bool) -> tuple[Rows, Rows, Bool]:
    """Pair each alloc with the next row, in time order, at the same address of the same device.

    Args:
        address, device, is_alloc: shape (n,), one row per alloc or free, in time order.

    Returns:
        The rows of allocs that ended, the rows that ended them (same shape), and a mask of shape (n,) of
        frees that match no alloc. Another alloc may end an alloc; its free was then not recorded.
    """
    order = address_order(address)
    are_several = bool(len(device)) and device.min() != device.max()
    if are_several:
        order = order[np.argsort(device[order], kind="stable")]
    first, second = order[:-1], order[1:]
    in_order = address[order]
    ends = is_alloc[first] & (in_order[:-1] == in_order[1:])
    if are_several:
        ends &= device[first] == device[second]
    unmatched = ~is_alloc
    unmatched[second[ends]] = False
    return first[ends], second[ends], unmatched


def address_order(address: UInt64) -> Rows:
    """Return indices that sort the addresses stably, several times faster than one stable argsort.

    They are sorted by 16 bits at a time, the lowest first: numpy sorts 16-bit numbers by counting them.
    """
    if not len(address):
        return np.empty(0, np.intp)
    offset = address - address.min()
    used = int(np.bitwise_or.reduce(offset))
    aligned = max((used & -used).bit_length() - 1, 0)
    order = np.argsort((offset >> np.uint64(aligned)).astype(np.uint16), kind="stable")
    for bit in range(aligned + 16, used.bit_length(), 16):
        digits = (offset >> np.uint64(bit)).astype(np.uint16)
        order = order[np.argsort(digits[order], kind="stable")]
    return order


def blocks_at(address: UInt64, event: Int64, blocks: Allocations) -> Int64:
    """Return the row of the block that was alive at each address after an event: int64, shape (n,).

    Args:
        address, event: addresses of blocks, and indices of events from -1; shape (n,).

    Returns:
        Rows of `blocks`, -1 where none was alive.
    """
    if not len(address):
        return np.empty(0, np.int64)
    addresses = np.unique(address)
    code = np.searchsorted(addresses, blocks.address).clip(max=len(addresses) - 1)
    candidates = np.flatnonzero(addresses[code] == blocks.address)
    width = int(max(blocks.born.max(initial=-1), event.max())) + 3
    keys = code[candidates] * width + blocks.born[candidates] + 1
    order = np.argsort(keys, kind="stable")
    candidates, keys = candidates[order], keys[order]
    last = np.searchsorted(keys, np.searchsorted(addresses, address) * width + event + 1, side="right") - 1
    row = np.append(candidates, -1)[last]
    is_match = (last >= 0) & (blocks.address[row] == address) & (blocks.freed[row] > event)
    return np.where(is_match, row, -1).astype(np.int64)


_BEGINS_OR_ENDS = code_mask((Kind.ALLOC, Kind.FREE_COMPLETED, Kind.STORAGE_FREE))


def pair(events: Events, start: StartState) -> Allocations:
    """Return when each block was allocated and freed, from the events and the start state. Vectorized."""
    touched = np.flatnonzero(_BEGINS_OR_ENDS[events.kind])
    addressed = np.flatnonzero(start.address != 0)
    is_alloc = np.concatenate((np.ones(len(addressed), bool), events.kind[touched] == Kind.ALLOC))
    began, ended, unmatched = match_frees(
        np.concatenate((start.address[addressed], events.address[touched])),
        np.concatenate((start.device[addressed], events.device[touched])),
        is_alloc,
    )
    allocs = touched[is_alloc[len(addressed) :]]
    born = np.concatenate((np.full(len(start), -1, np.int64), allocs))
    event_of = np.concatenate((np.full(len(addressed), -1, np.int64), touched))
    row_of = np.empty(len(is_alloc), np.int64)
    row_of[: len(addressed)] = addressed
    row_of[len(addressed) :] = len(start) + np.cumsum(is_alloc[len(addressed) :]) - 1
    freed = np.full(len(born), len(events), np.int64)
    freed[row_of[began]] = event_of[ended]
    return Allocations(
        born,
        freed,
        unseen_frees=int(np.count_nonzero(is_alloc[ended])),
        unmatched_frees=event_of[unmatched & (event_of >= 0)],
        _events=events,
        _start=start,
    )


def attributed(blocks: Allocations, events: Events, start: StartState) -> Allocations:
    """Return the same blocks with the columns of events and a start state that are attributed by now."""
    result = replace(blocks, _events=events, _start=start)
    before = blocks._events, blocks._start  # noqa: SLF001
    for name, column in vars(blocks).items():
        if all(
            getattr(old, name, None) is getattr(new, name, None)
            for old, new in zip(before, (events, start), strict=True)
        ):
            vars(result).setdefault(name, column)
    return result


def unreported_frees(events: Events, blocks: Allocations) -> Rows:
    """Return the rows of blocks whose address was allocated again although no free was reported."""
    ended = np.flatnonzero(blocks.freed < len(events))
    rows: Rows = ended[events.kind[blocks.freed[ended]] == Kind.ALLOC]
    return rows


def frees_of_unknown(events: Events, blocks: Allocations) -> Int64:
    """Return the indices of reported frees of blocks that the trace never knew.

    A report that follows the end of a block of the start state, which was observed directly, is not among
    them: the allocator reports the same free.
    """
    reported: Int64 = blocks.unmatched_frees[events.kind[blocks.unmatched_frees] == Kind.FREE_COMPLETED]
    if not len(reported):
        return reported
    observed = events.address[events.kind == Kind.STORAGE_FREE]
    unknown: Int64 = reported[~np.isin(events.address[reported], observed, kind="sort")]
    return unknown


def live_levels(allocations: Allocations, size: Int64, events: int, device: int) -> Int64:
    """Return the live bytes on a device: shape (events + 1,); entry 0 is before the first event.

    Args:
        size: the bytes of each block, as requested or as the allocator rounded them.
    """
    start, own = int(np.searchsorted(allocations.born, 0)), allocations.device == device
    own[:start] &= allocations.freed[:start] >= 0  # of blocks at one address only the last
    if not own.all():
        size = np.where(own, size, 0)
    delta = np.zeros(events + 2, np.int64)
    delta[0] = size[:start].sum()
    after = delta[1:]
    after[allocations.born[start:]] = size[start:]
    for rows in pieces_of(len(size)):
        after[allocations.freed[rows]] -= size[rows]  # an event frees one block at most
    level: Int64 = np.cumsum(delta, out=delta)[:-1]
    return level


def reserved_levels(events: Events, device: int, at_start: int | None) -> Int64 | None:
    """Return the reserved bytes on a device: int64, shape (events + 1,); entry 0 is before the first event.

    Args:
        at_start: the bytes before the first event; None takes the first value that an event reports.

    Returns:
        None if no event reports a value and `at_start` is None.
    """
    if at_start is not None and events.reserved.strides == (0,) and (events.reserved[:1] == at_start).all():
        return np.broadcast_to(np.int64(at_start), len(events) + 1)  # one value, which takes no memory
    is_reported = (events.device == device) & (events.reserved >= 0)
    if is_reported.all() and len(events):
        first = events.reserved[0] if at_start is None else at_start
        return events.kept(lambda: (np.array([first], np.int64), events.reserved))
    reported = np.flatnonzero(is_reported)
    if at_start is None:
        if not len(reported):
            return None
        at_start = int(events.reserved[reported[0]])
    values = np.concatenate((np.array([at_start], np.int64), events.reserved[reported]))
    levels = np.repeat(values, np.diff(reported, prepend=-1, append=len(events)))
    return events.kept(lambda: (levels,))


def window_levels(events: Events, device: int, first: int = 0, end: int | None = None) -> Int64:
    """Return the running sum of reported allocs and frees in bytes, from 0, at some events.

    Args:
        first, end: the levels before event first to after event end - 1: shape (end - first + 1,).
    """
    sign = np.zeros(len(Kind), np.int64)
    sign[Kind.ALLOC], sign[Kind.FREE_COMPLETED] = 1, -1

    def changes(rows: slice) -> Int64:
        return np.where(events.device[rows] == device, sign[events.kind[rows]] * events.bytes[rows], 0)

    levels = np.empty((len(events) if end is None else end) - first + 1, np.int64)
    levels[0] = sum(int(changes(rows).sum()) for rows in pieces_of(first))
    for rows in pieces_of(len(levels) - 1):
        levels[1:][rows] = changes(slice(first + rows.start, first + rows.stop))
    return np.cumsum(levels, out=levels)
