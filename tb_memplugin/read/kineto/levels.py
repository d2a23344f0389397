"""Find what was alive before a Kineto trace begins, so that every level equals the profiler's counter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tb_memplugin.read.kineto.events import MemoryRows
from tb_memplugin.read.shared_memory import SHARED
from tb_memplugin.trace import Counter, CounterReading, MemoryTrace, Moment, Note, StartState, start_state
from tb_memplugin.trace.replay import address_order, unreported_frees
from tb_memplugin.trace.tables import Bool, Int64, UInt64


@dataclass(frozen=True, slots=True)
class Beginning:
    """One device at the trace's start: the blocks that are freed in the trace, and the bytes of all others.

    `counted` is the device's counter at the start, None if the file contains no counter. `other_bytes` is
    negative if the blocks sum to more than the counter.
    """

    address: UInt64
    bytes: Int64
    counted: int | None

    @property
    def other_bytes(self) -> int:
        """The bytes of blocks that are not known individually."""
        return 0 if self.counted is None else self.counted - int(self.bytes.sum())


def beginnings(memory: MemoryRows) -> list[Beginning]:
    """Return the beginning of each device. A block whose first event is a free was alive before the trace."""
    return [_beginning(memory, device) for device in range(len(memory.devices))]


def _beginning(memory: MemoryRows, device: int) -> Beginning:
    here = np.flatnonzero((memory.device == device) & ~memory.oom & (memory.bytes != 0))
    size = memory.bytes[here]
    order = address_order(memory.address[here])
    address = memory.address[here][order]
    first = order[np.concatenate(([True], address[1:] != address[:-1]))[: len(address)]]
    freed = first[size[first] < 0]
    return Beginning(memory.address[here][freed], -size[freed], _counted(memory, device))


def _counted(memory: MemoryRows, device: int) -> int | None:
    """Return the counter before the first event: `Total Allocated` minus all bytes up to that event."""
    here = np.flatnonzero(memory.device == device)
    with_total = np.flatnonzero(memory.total[here] >= 0)
    if not len(with_total):
        return None
    moved = np.where(memory.oom[here], 0, memory.bytes[here])[: with_total[0] + 1]
    return int(memory.total[here[with_total[0]]]) - int(moved.sum())


def start_of(starts: Sequence[Beginning], not_named: int, in_blocks: Bool) -> StartState:
    """Return the start state: the blocks of each device, then a row without an address for its other bytes.

    Args:
        not_named: the row of the owner `(not named)`.
        in_blocks: mask of devices whose sizes are those of whole (rounded) blocks.
    """
    other_bytes = np.array([max(beginning.other_bytes, 0) for beginning in starts], np.int64)
    rest = np.flatnonzero(other_bytes).astype(np.uint8)
    blocks = np.concatenate([*(beginning.bytes for beginning in starts), other_bytes[rest]])
    named = [np.full(len(beginning.address), row, np.uint8) for row, beginning in enumerate(starts)]
    device = np.concatenate([*named, rest])
    return start_state(
        blocks,
        device=device,
        address=np.concatenate(
            [*(beginning.address for beginning in starts), np.zeros(len(rest), np.uint64)]
        ),
        module=np.full(len(blocks), not_named, np.int32),
        rounded=np.where(in_blocks[device], blocks, -1),
    )


def counter_readings(memory: MemoryRows, starts: Sequence[Beginning]) -> Iterator[CounterReading]:
    """Yield what the counter in the events says of each device.

    That of the CPU counts only while a profiler is on, so it says nothing of all that is live.
    """
    for device, (name, beginning) in enumerate(zip(memory.devices, starts, strict=True)):
        total = memory.total[(memory.device == device) & (memory.total >= 0)]
        if beginning.counted is None or name.startswith(("cpu", SHARED)):
            yield from (CounterReading(device, moment, Counter.SEEN) for moment in Moment)
            continue
        levels = beginning.counted, max(beginning.counted, int(total.max())), int(total[-1])
        for moment, level in zip(Moment, levels, strict=True):
            yield CounterReading(device, moment, Counter.ALLOCATED, level)


def notes_on_levels(trace: MemoryTrace, memory: MemoryRows, starts: Sequence[Beginning]) -> Iterator[Note]:
    """Yield notes on what is not exact in a trace's levels, and by how much."""
    for device, (name, beginning) in enumerate(zip(memory.devices, starts, strict=True)):
        here = np.flatnonzero(memory.device == device)
        if not memory.named[here].all():
            count = int(np.count_nonzero(~memory.named[here]))
            yield Note(
                f"{name}: {count:,} events have no address (PyTorch before 1.10), so it is not known "
                "which of several blocks of one size was freed: which of their "
                f"{_allocated(memory, here[~memory.named[here]]):,} bytes lived when. No sum depends on it.",
                "no_addresses",
                _allocated(memory, here[~memory.named[here]]),
                device=name,
            )
        if beginning.counted is None and not name.startswith(SHARED):
            yield Note(
                f"{name}: the file has no totals (PyTorch before 1.10). Of what was allocated before the "
                f"file begins, only the {int(beginning.bytes.sum()):,} bytes that are freed in it are "
                "counted: the rest is missing from every level.",
                "no_totals",
                int(beginning.bytes.sum()),
                device=name,
            )
        if beginning.other_bytes < 0:
            yield Note(
                f"{name}: the blocks that were alive before the first event sum to "
                f"{-beginning.other_bytes:,} bytes more than the profiler's counter.",
                "more_than_counter",
                -beginning.other_bytes,
                device=name,
            )
        if name.startswith("cpu") and beginning.other_bytes > 0:
            yield Note(
                f"{name}: the counter is at {beginning.counted:,} bytes when the trace begins. It counts "
                "only while a profiler is on, and does not see frees in between, so these bytes may "
                "be too many. What was allocated before any profiler was on is not included.",
                "counter_at_start",
                beginning.counted,
                device=name,
            )
        live = trace.live(device)[here + 1]
        yield from _disagreement(name, live, memory.total[here])
        reserved = trace.events.reserved[here]
        beyond = np.where(reserved >= 0, live - reserved, 0)
        count = int(np.count_nonzero(beyond > 0))
        if count:
            yield Note(
                f"{name}: after {count:,} of {len(here):,} events, more is live than the file reports "
                f"as reserved, by up to {int(beyond.max()):,} bytes.",
                "more_live_than_reserved",
                int(beyond.max()),
                device=name,
            )
    blocks, frees = trace.allocations, trace.allocations.unmatched_frees
    if size := int(blocks.bytes[unreported_frees(trace.events, blocks)].sum()):
        yield Note(
            f"Blocks freed without an event: {blocks.unseen_frees:,}, of {size:,} bytes. "
            "They count as freed when their address was used again.",
            "unseen_frees",
            size,
        )
    if size := int(trace.events.bytes[frees].sum()):
        yield Note(
            f"Frees of blocks that were not alive, ignored: {len(frees):,}, of {size:,} bytes.",
            "unmatched_frees",
            size,
        )


def note_on_invalid(trace: MemoryTrace, memory: MemoryRows, not_events: int) -> Iterator[Note]:
    """Yield a note on what may be memory, but has no size: its bytes, as far as the counters tell them.

    Args:
        memory: its rows.
        not_events: how many entries are no events at all.
    """
    if not (memory.sizeless or not_events):
        return
    sizeless = f"{memory.sizeless:,} memory events have no size"
    note = f"{sizeless}, and {not_events:,} traceEvents are not objects; left out"
    has_total = memory.total >= 0
    live = np.zeros(len(has_total), np.int64)
    for device in range(len(memory.devices)):
        here = memory.device == device
        live[here] = trace.live(device)[1:][here]
    if has_total.any():
        apart = int(np.abs(live - memory.total)[has_total].max())
        yield Note(
            f"{note}: by the file's counters, up to {apart:,} bytes of the levels are wrong.",
            "no_sizes",
            apart,
        )
    else:
        most = int(live.max())
        yield Note(
            f"{note}: no counter tells their bytes; the others have up to {most:,} bytes.", "no_sizes", most
        )


def _allocated(memory: MemoryRows, rows: Int64) -> int:
    size = memory.bytes[rows]
    return int(size[size > 0].sum())


def _disagreement(name: str, live: Int64, total: Int64) -> Iterator[Note]:
    apart = np.where(total >= 0, np.abs(live - total), 0)
    wrong = int(np.count_nonzero(apart))
    if wrong:
        yield Note(
            f"{name}: after {wrong:,} of {len(live):,} events the live blocks do not sum to the profiler's "
            f"own counter; they are up to {int(apart.max()):,} bytes apart.",
            "differs_from_counter",
            int(apart.max()),
            device=name,
        )
