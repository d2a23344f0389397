"""Moments: a device's highest, and the allocations that are live at any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tb_memplugin.analysis.divisions import Divided, Part, parts_of
from tb_memplugin.analysis.steps import highest_step
from tb_memplugin.errors import NotRecordedError
from tb_memplugin.trace import Category, Kind, MemoryTrace, Phase, Reason
from tb_memplugin.trace.result import AnalysisResult, ResultTable
from tb_memplugin.trace.tables import CERTAIN, Rows


@dataclass(frozen=True, slots=True)
class LiveAllocation(AnalysisResult):
    """One live block. `born_ns` is None if it was alive before the window, `freed_ns` if it outlived it.

    `row` is its row in `trace.allocations`. `module`, `operator` and `name` (a parameter's FQN, say) are
    None if not known. `tensor` is what lies in it, such as "float32 [8, 2048]", None if not known. `reason`
    says why it has its category; `analysis.why` makes a sentence of it.
    `module_confidence` is 100 if the module was recorded, else how sure it is, in percent.
    """

    row: int
    bytes: int
    address: int
    category: Category
    phase: Phase
    module: str | None
    operator: str | None
    name: str | None
    born_ns: int | None
    freed_ns: int | None
    reason: Reason = Reason.NOT_RECORDED
    module_confidence: int = CERTAIN
    tensor: str | None = None


@dataclass(frozen=True, slots=True)
class Moment(AnalysisResult):
    """The state of a device (its name) after an event, in a step (its number). Bytes; epoch nanoseconds.

    `reserved` is None if the device reserves no memory, or if it is not known; see `MemoryTrace.reserved`.
    `module` and `largest`, the largest live blocks, are found when they are first read: modules of stacks are
    inferred then.
    """

    device: str
    event: int
    time_ns: int
    step: int
    bytes: int
    reserved: int | None
    phase: Phase
    module: str | None = field(init=False)
    operator: str | None
    largest: ResultTable[LiveAllocation] = field(init=False)
    _trace: MemoryTrace = field(repr=False)
    _alive: Rows = field(repr=False)
    _most: int = field(repr=False)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            """Find a field that is not set yet."""
            trace = self._trace
            if name == "module":
                module = int(trace.events.module[self.event]) if self.event >= 0 else -1
                object.__setattr__(self, name, _module(trace, module))
            elif name == "largest":
                rows = largest_rows(trace, self._alive, self._most).tolist()
                object.__setattr__(self, name, ResultTable(live_allocation(trace, row) for row in rows))
            return object.__getattribute__(self, name)

    @property
    def trace(self) -> MemoryTrace:
        """The trace of which this is a moment."""
        return self._trace

    def parts(self, by: Divided) -> ResultTable[Part]:
        """Divide the live bytes into parts that sum to them, largest first."""
        return parts_of(self._trace, self._alive, by)


def moment(trace: MemoryTrace, device: int, event: int, *, largest: int = 10) -> Moment:
    """Return the state of a device after an event; -1 is the moment before the first."""
    events, has_event = trace.events, event >= 0
    reserved = trace.reserved(device)
    alive = trace.allocations.alive_at(event, device)
    return Moment(
        device=trace.devices[device].name,
        event=event,
        time_ns=trace.time_of(event),
        step=trace.step_at(event).number,
        bytes=int(trace.live(device)[event + 1]),
        reserved=None if reserved is None else int(reserved[event + 1]),
        phase=_phase(trace, event) if has_event else Phase.BEFORE,
        operator=_named(trace.operators, int(events.operator[event])) if has_event else None,
        _trace=trace,
        _alive=alive,
        _most=largest,
    )


def _phase(trace: MemoryTrace, event: int) -> Phase:
    """Return the phase of an event. Sources record none for frees; these get the phase that ran then."""
    own = Phase(int(trace.events.phase[event]))
    if own != Phase.OTHER or trace.events.kind[event] == Kind.ALLOC:
        return own
    at = trace.events.time_ns[event]
    ran = np.flatnonzero((trace.phases.start_ns <= at) & (at < trace.phases.end_ns))
    return Phase(int(trace.phases.name[ran[-1]])) if len(ran) else own


def largest_rows(trace: MemoryTrace, rows: Rows, limit: int) -> Rows:
    """Return the `limit` largest of some rows of `trace.allocations`, largest first."""
    return rows[np.argsort(-trace.allocations.bytes[rows], kind="stable")[:limit]]


def live_allocation(trace: MemoryTrace, row: int) -> LiveAllocation:
    """Return a row of `trace.allocations` with names instead of table rows."""
    blocks, time = trace.allocations, trace.events.time_ns
    born, freed = int(blocks.born[row]), int(blocks.freed[row])
    return LiveAllocation(
        row=row,
        bytes=int(blocks.bytes[row]),
        address=int(blocks.address[row]),
        category=Category(int(blocks.category[row])),
        phase=Phase(int(blocks.phase[row])),
        module=_module(trace, int(blocks.module[row])),
        operator=_named(trace.operators, int(blocks.operator[row])),
        name=_named(trace.labels, int(blocks.label[row])),
        born_ns=int(time[born]) if born >= 0 else None,
        freed_ns=int(time[freed]) if freed < len(time) else None,
        reason=Reason(int(blocks.reason[row])),
        module_confidence=int(blocks.module_confidence[row]),
        tensor=tensor_name(trace, row),
    )


def tensor_name(trace: MemoryTrace, row: int) -> str | None:
    """Return the tensor in a block (a row of `trace.allocations`): "float32 [8, 2048]", None if not known."""
    tensor = int(trace.allocations.tensor[row])
    return str(trace.tensors[tensor]) if tensor >= 0 else None


def _module(trace: MemoryTrace, row: int) -> str | None:
    return trace.modules[row].key if row >= 0 else None


def _named(names: Sequence[str], row: int) -> str | None:
    return names[row] if row >= 0 else None


def peak(
    trace: MemoryTrace,
    device: str | None = None,
    step: int | None = None,
    *,
    largest: int = 10,
    within: tuple[int, int] | None = None,
) -> Moment:
    """Return the moment with the most live bytes.

    Args:
        device: a device's name; None takes the one with the highest peak.
        step: a step's number; None looks at the whole window.
        within: the first and the last event of a range to look at instead, which includes the moment before
            the first: the result of `events_between`, or up to an allocation: `(0, usage(...).event)`.

    Raises:
        NotRecordedError: the trace has no such device or step, or no device at all.
    """
    if not trace.devices:
        raise NotRecordedError(
            "The trace has no device.", where=trace.source, fix="Profile with profile_memory=True."
        )
    rows = trace.device_rows(device)
    if within is not None:
        row = max(rows, key=lambda row: highest_within(trace, row, within)[0])
        return moment(trace, row, highest_within(trace, row, within)[1], largest=largest)
    steps = None if step is None else [trace.step_row(step)]
    candidates = [(row, highest_step(trace, row, steps)) for row in rows]
    row, highest = max(candidates, key=lambda candidate: candidate[1].peak_bytes)
    return moment(trace, row, highest.peak_event, largest=largest)


def highest_within(trace: MemoryTrace, device: int, within: tuple[int, int]) -> tuple[int, int]:
    """Return the most live bytes of a device (its row) in a range of events, and the event that reaches it.

    The event is one less than the first of the range if that is the moment before it.
    """
    first, last = within
    level = trace.live(device)[first : last + 2]
    top = int(np.argmax(level))
    return int(level[top]), first - 1 + top


def events_between(trace: MemoryTrace, start_ns: int | None, end_ns: int | None) -> tuple[int, int]:
    """Return the first event at or after a time and the last at or before another, in epoch nanoseconds.

    None is the start or the end of the window. Without an event between the times, the last is the one before
    the first.

    Raises:
        NotRecordedError: the times are outside the window, or the first is after the second.
    """
    time = trace.events.time_ns
    first = 0 if start_ns is None else int(np.searchsorted(time, start_ns, side="left"))
    last = len(time) - 1 if end_ns is None else trace.event_at(end_ns)
    if last < first - 1 or (start_ns is not None and first == len(time)) or (end_ns is not None and last < 0):
        begin, end = (int(time[0]), int(time[-1])) if len(time) else (0, 0)
        raise NotRecordedError(
            "Nothing was recorded in this range of times.",
            where=trace.source,
            fix=f"The window is from {begin // 1_000} to {end // 1_000} microseconds.",
        )
    return first, last
