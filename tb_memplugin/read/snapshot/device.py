"""One device of a snapshot: its entries, the state before them, and contradictions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from tb_memplugin.read.faults import Tally, notes_on
from tb_memplugin.read.snapshot.blocks import FinalState
from tb_memplugin.read.snapshot.entries import Entries
from tb_memplugin.read.snapshot.rewind import (
    Beginning,
    first_segments,
    pools_of,
    reserved_levels,
    rewind,
)
from tb_memplugin.read.snapshot.rounding import extents_at_birth, rounded_surely
from tb_memplugin.trace import Counter, CounterReading, Device, Kind, Moment, Note
from tb_memplugin.trace.kinds import SEGMENT_KINDS
from tb_memplugin.trace.notes import NO_TIMES, OUT_OF_MEMORY
from tb_memplugin.trace.tables import Bool, Int64, UInt8, code_mask, pieces_of

LISTED_OOMS = 3
"""The largest number of out-of-memory entries per device that get their own note."""


class SnapshotDevice:
    """The columns of one device, before devices are merged.

    Args:
        row: the device's row in the trace.
        final: the device's state when the snapshot was taken. If it is not known, the only known blocks are
            those that an entry allocates or frees.
        rounds_plainly: whether sizes are known to be rounded to multiples of 512 bytes, and not further.
        splits_all: whether blocks of any size are known to be split.
    """

    def __init__(
        self,
        row: int,
        name: str,
        entries: Entries,
        final: FinalState,
        *,
        rounds_plainly: bool = False,
        splits_all: bool = False,
    ) -> None:
        self.row = row
        self.name = name
        written = entries if final.recorded else _without_segments(entries)
        self.entries = entries = _with_completed_frees(written, final)
        self._taken_as_completed = Tally.of(entries.kind != written.kind, entries.bytes)
        self.final = final
        self._rounds_plainly = rounds_plainly
        self._splits_all = splits_all
        self.start: Beginning = rewind(entries, final)
        self.reserved_at_start, self.reserved = reserved_levels(entries, final)
        self.segments = first_segments(entries, final.segments)
        self.pool = pools_of(entries, final.segments)

    def __len__(self) -> int:
        return len(self.entries.kind)

    @property
    def device(self) -> Device:
        """The device's row in the trace's table of devices."""
        return Device(
            self.name, reserved_at_start=max(self.reserved_at_start, 0) if self.final.recorded else None
        )

    def event_columns(self) -> dict[str, np.ndarray]:
        """Return the columns of `Events` that a snapshot contains."""
        entries = self.entries
        reserved = np.broadcast_to(np.int64(-1), len(self))
        if self.final.recorded:
            reserved = np.maximum(self.reserved, 0) if (self.reserved < 0).any() else self.reserved
        return {
            "time_ns": entries.time_ns,
            "kind": entries.kind,
            "device": np.broadcast_to(np.uint8(self.row), len(self)),
            "address": entries.address,
            "bytes": entries.bytes,
            "label": entries.label,
            "stack": entries.stack,
            "reserved": reserved,
            "stream": entries.stream,
            "pool": self.pool,
            "context": entries.context,
            "forward": entries.forward,
            "rounded": self._rounded_at_birth(),
        }

    def _rounded_at_birth(self) -> Int64:
        """Return what the allocator used for each alloc, in bytes; -1 where that is not certain."""
        entries, start, final = self.entries, self.start, self.final
        rounded = self._rounded(entries.bytes)
        rounded[entries.kind != Kind.ALLOC] = -1
        contradictions = sum(tally.count for tally in start.anomalies.values())
        if self._rounds_plainly and self._splits_all and not contradictions + self.segments.contradictions:
            large = extents_at_birth(entries, start, self.segments.segments, final)
            rounded = np.where(large >= 0, large, rounded)
        in_trace = start.alloc >= 0
        rounded[start.alloc[in_trace]] = final.rounded[in_trace]
        return rounded

    def start_columns(self) -> dict[str, np.ndarray]:
        """Return the columns of `StartState`; stream and pool of freed blocks come from the freeing entry."""
        start, final = self.start, self.final
        kept, freed = start.final >= 0, start.freed >= 0
        columns = {name: np.full(len(kept), -1, np.int64) for name in ("stack", "stream", "pool", "rounded")}
        for name, column in columns.items():
            column[kept] = getattr(final, name)[start.final[kept]]
        columns["rounded"][freed] = self._rounded(start.bytes[freed])
        columns["stream"][freed] = self.entries.stream[start.freed[freed]]
        columns["pool"][freed] = self.pool[start.freed[freed]]
        return {
            "device": np.full(len(kept), self.row, np.uint8),
            "address": start.address,
            "bytes": start.bytes,
            "pending": self._pending(),
            **columns,
        }

    def _rounded(self, requested: Int64) -> Int64:
        """Return what the allocator used for requests, in bytes; -1 where that is not certain."""
        if not self._rounds_plainly:
            return np.full(len(requested), -1, np.int64)
        return rounded_surely(requested, self.entries, self.final)

    def segment_columns(self) -> dict[str, np.ndarray]:
        """Return the columns of `Segments`: the ranges reserved before the first entry."""
        first = self.segments.segments
        columns = {
            name: getattr(first, name) for name in ("address", "bytes", "stream", "pool", "expandable")
        }
        return {"device": np.full(len(first.address), self.row, np.uint8), **columns}

    def counters(self) -> Iterator[CounterReading]:
        """Yield what the allocator counts in its segments after the last entry."""
        counted = self.final.requested if self.final.recorded and len(self.final.segments.bytes) else None
        counter = Counter.SEEN if counted is None else Counter.BLOCKS
        yield CounterReading(self.row, Moment.END, counter, counted)

    def notes(self) -> Iterator[Note]:
        """Yield notes on contradictions, on what is not known, and on failed allocations."""
        return (note.of(self.name) for note in (*self._notes(), *self._ooms()))

    def _notes(self) -> Iterator[Note]:
        for faults in (self.final.faults, self.entries.faults, self.start.anomalies):
            yield from notes_on(faults)
        if (early := self._taken_as_completed).count:
            yield Note(
                f"{early.count:,} frees ({early.bytes:,} bytes) were requested, and the "
                "snapshot has no completed frees (skip_actions); they are taken as completed at once.",
                "no_completed_frees",
                early.bytes,
            )
        kind = self.entries.kind
        if (kind == Kind.FREE_COMPLETED).any() and not (kind == Kind.ALLOC).any():
            yield Note(
                f"the snapshot has frees but no allocations. If skip_actions left them out, "
                "what was allocated after the first entry is shown as if it had been there before: up to "
                f"{int(self.start.bytes.sum()):,} bytes.",
                "no_allocations",
                int(self.start.bytes.sum()),
            )
        below = int(np.count_nonzero(self.reserved < 0))
        if below or self.reserved_at_start < 0:
            lowest = min(self.reserved_at_start, int(self.reserved.min(initial=0)))
            yield Note(
                f"reserved memory falls below zero after {below:,} entries, by up to "
                f"{-lowest:,} bytes; shown as 0.",
                "reserved_below_zero",
                -lowest,
            )
        if self.segments.contradictions:
            yield Note(
                f"segment entries and final segments differ by "
                f"{self.segments.contradictions:,} bytes, so the positions of free blocks are not "
                "certain.",
                "segments_differ",
                self.segments.contradictions,
            )
        if len(self) and not self.entries.timed:
            yield Note(
                "the snapshot tells no times (PyTorch before 2.2). The index of an entry "
                "is shown as its time, in microseconds, and the order of entries of different devices "
                "is not known.",
                NO_TIMES,
            )
        beyond = self._beyond_reserve()
        if len(beyond):
            reserve_recorded = code_mask(SEGMENT_KINDS)[self.entries.kind].any()
            why = (
                "entries are missing, or sizes are wrong"
                if reserve_recorded
                else "no entry says how the reserved memory changed"
            )
            yield Note(
                f"after {len(beyond):,} entries, more is live than reserved, by up to "
                f"{int(beyond.max()):,} bytes: {why}.",
                "more_live_than_reserved",
                int(beyond.max()),
            )

    def _beyond_reserve(self) -> Int64:
        """Return by how many bytes the live bytes exceed the reserve, for each entry after which they do."""
        if not self.final.recorded:
            return np.zeros(0, np.int64)
        sign = np.zeros(len(Kind), np.int64)
        sign[Kind.ALLOC], sign[Kind.FREE_COMPLETED] = 1, -1
        live, beyond = int(self.start.bytes.sum()), list[Int64]()
        for rows in pieces_of(len(self)):
            levels = live + np.cumsum(sign[self.entries.kind[rows]] * self.entries.bytes[rows])
            live = int(levels[-1]) if len(levels) else live
            above = levels - np.maximum(self.reserved[rows], 0)
            beyond.append(above[above > 0])
        return np.concatenate(beyond)

    def _ooms(self) -> Iterator[Note]:
        ooms = np.flatnonzero(self.entries.kind == Kind.OOM).tolist()
        for index in ooms[:LISTED_OOMS]:
            free = self.entries.free_bytes.get(index)
            rest = f" with {free:,} bytes free on the device" if free is not None else ""
            asked = int(self.entries.bytes[index])
            yield Note(
                f"out of memory at entry {index}: {asked:,} bytes requested{rest}.",
                OUT_OF_MEMORY,
                asked,
            )
        if len(ooms) > LISTED_OOMS:
            most = int(self.entries.bytes[ooms].max())
            yield Note(
                f"out of memory {len(ooms)} times in all, at requests of up to {most:,} bytes.",
                OUT_OF_MEMORY,
                most,
            )

    def _pending(self) -> UInt8:
        """Return a mask of start blocks whose free was requested before and waits for a stream."""
        start = self.start
        kept = start.final >= 0
        waits: Bool = ~kept
        waits[kept] = self.final.pending[start.final[kept]] != 0
        requests = np.flatnonzero(self.entries.kind == Kind.FREE_REQUESTED)
        if not len(requests):
            completed = np.count_nonzero(self.entries.kind == Kind.FREE_COMPLETED)
            if completed > np.count_nonzero(~kept):  # frees of newer blocks, too: requests are not recorded
                waits[~kept] = False
            return waits.astype(np.uint8)
        address, first = np.unique(self.entries.address[requests], return_index=True)
        index = np.searchsorted(address, start.address).clip(max=len(address) - 1)
        request = requests[first[index]]
        in_trace = address[index] == start.address
        in_trace &= kept | (request < start.freed)
        waits &= ~in_trace
        return waits.astype(np.uint8)


def _without_segments(entries: Entries) -> Entries:
    """Return the entries with those of segments as marks: the ranges that they join or cut are not known."""
    kind = np.where(code_mask(SEGMENT_KINDS)[entries.kind], np.uint8(Kind.MARK), entries.kind)
    return replace(entries, kind=kind)


def _with_completed_frees(entries: Entries, final: FinalState) -> Entries:
    """Return the entries with requested frees as completed ones if `skip_actions` left these out.

    Requests for blocks that are still pending in the final state stay as they are.
    """
    if (entries.kind == Kind.FREE_COMPLETED).any():
        return entries
    waits = np.isin(entries.address, final.address[final.pending != 0])
    over = (entries.kind == Kind.FREE_REQUESTED) & ~waits
    return replace(entries, kind=np.where(over, np.uint8(Kind.FREE_COMPLETED), entries.kind))
