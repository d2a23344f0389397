"""Make a `MemoryTrace` from a tracer's ledger."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tb_memplugin.sources.caches import with_caches
from tb_memplugin.sources.categories import Born, Judged, by_lifetime, of_known
from tb_memplugin.sources.phases import phase_at, phase_spans, stretch
from tb_memplugin.sources.storage_lifetimes import BEFORE, Block, Buffer, Entry, Happened, Ledger
from tb_memplugin.sources.tables import Call, Mark, Names, Owners, named_phases, operator_name
from tb_memplugin.sources.tracer.layers import Layers
from tb_memplugin.trace import (
    Category,
    Counter,
    Device,
    Events,
    Kind,
    MemoryTrace,
    Phase,
    Reason,
    Spans,
    StartState,
    Step,
    at_every_moment,
    events,
    start_state,
)
from tb_memplugin.trace.tables import Int64

SOURCE = "MemoryTracer"


@dataclass(slots=True)
class Recorded:
    """What a tracer recorded between two times (epoch nanoseconds), with notes.

    `marks` are the starts and ends of named phases: (epoch ns, name, whether it ends).
    """

    layers: Layers
    start_ns: int
    stop_ns: int = 0
    marks: deque[Mark] = field(default_factory=deque)
    notes: list[str] = field(default_factory=list)
    properties: dict[str, str] = field(default_factory=dict)

    @property
    def ledger(self) -> Ledger:
        """The ledger of the recorded storages."""
        return self.layers.ledger


@dataclass(slots=True)
class _Tables:
    operators: Names
    labels: Names
    owners: Owners


def trace_from_ledger(recorded: Recorded) -> MemoryTrace:
    """Return the trace of the ledger's kept entries; blocks alive before them are the start state."""
    ledger = recorded.ledger
    entries = list(ledger.entries)
    tables = _Tables(Names(), Names(), Owners(recorded.layers.names.modules))
    memory = [entry for entry in entries if entry[1] <= Happened.FREE]
    phases = _phases(recorded.layers)
    start = _start(memory, ledger, tables)
    full = _events(memory, tables, phases)
    devices = tuple(Device(name) for name in ledger.devices) or (Device(ledger.device_type),)
    names = Names()
    trace = MemoryTrace(
        source=SOURCE,
        events=full,
        start=start,
        devices=devices,
        steps=(Step(0, recorded.start_ns, recorded.stop_ns),),
        operators=tables.operators.as_tuple(),
        labels=tables.labels.as_tuple(),
        phases=phases,
        calls=tables.owners.calls(_ended(entries)),
        annotations=named_phases(recorded.marks, full, names),
        annotation_names=names.as_tuple(),
        modules=tables.owners.as_tuple(),
        counters=at_every_moment(len(devices), Counter.SEEN),
        notes=tuple(recorded.notes),
        properties={"torch": torch.__version__, **recorded.properties},
    )
    return with_caches(trace)


def _phases(layers: Layers) -> Spans:
    return phase_spans(
        stretch(layers.forward), stretch(layers.backward), stretch(layers.optimizer), np.empty(0, np.int64)
    )


def _ended(entries: Sequence[Entry]) -> Iterator[Call]:
    """Yield the layer calls that ended."""
    for time, what, _, row, phase, _, began in entries:
        if what is Happened.EXIT:
            yield began, time, row, phase


def _start(memory: Sequence[Entry], ledger: Ledger, tables: _Tables) -> StartState:
    """Return the blocks whose allocation is not in the kept entries, but that were alive during them."""
    born = {id(entry[2]) for entry in memory if entry[1] is Happened.ALLOC}
    ended = (entry[2] for entry in memory if entry[1] is Happened.FREE)
    blocks = [block for block in (*ended, *ledger.blocks.values()) if block and id(block) not in born]
    return _start_rows(blocks, tables)


def _start_rows(blocks: Sequence[Block | Buffer], tables: _Tables) -> StartState:
    category = np.array([_old_category(block) for block in blocks], np.uint8)
    nobody = tables.owners.not_named if any(block.module < 0 for block in blocks) else -1
    return start_state(
        [block.bytes for block in blocks],
        device=[block.device for block in blocks],
        address=np.array([block.address for block in blocks], np.uint64),
        category=category,
        reason=np.where(
            category == [int(block.category) for block in blocks], of_known(category), Reason.IN_FORWARD
        ),
        module=[block.module if block.module >= 0 else nobody for block in blocks],
        label=[tables.labels.add(block.label) if block.label else -1 for block in blocks],
        stack=[block.stack for block in blocks],
    )


def _old_category(block: Block | Buffer) -> Category:
    """Return the category of a block whose allocation is not in the kept entries."""
    if block.category is Category.UNKNOWN and block.serial > BEFORE and block.phase is Phase.FORWARD:
        return Category.ACTIVATION
    return block.category


def _events(memory: Sequence[Entry], tables: _Tables, phases: Spans) -> Events:
    blocks = [entry[2] for entry in memory]
    time = np.array([entry[0] for entry in memory], np.int64)
    is_alloc = np.array([entry[1] is Happened.ALLOC for entry in memory], bool)
    names: dict[Any, int] = {}
    operator = np.full(len(memory), -1, np.int64)
    for row in np.flatnonzero(is_alloc).tolist():
        made_by = blocks[row].made_by
        known = names.get(made_by)
        if known is None:
            known = names[made_by] = tables.operators.add(operator_name(made_by))
        operator[row] = known
    columns = _columns(blocks)
    # A block may get its owner after its allocation (optimizer state): the alloc event then has it, too.
    module = np.where(is_alloc, columns["module"], [entry[3] for entry in memory])
    loose = is_alloc & (module < 0)
    module[loose] = tables.owners.with_outside(module[loose], operator[loose], tables.operators)
    phase = np.array([entry[4] for entry in memory], np.uint8)
    phase = np.where(phase == Phase.BACKWARD, phase, phase_at(phases, time))
    category = columns["category"].copy()
    unknown = np.flatnonzero(is_alloc & (category == Category.UNKNOWN))
    reason = of_known(category.astype(np.uint8))
    judged = _by_lifetime(memory, unknown, columns, phase, operator, tables, phases)
    category[unknown], reason[unknown] = judged
    category[~is_alloc], reason[~is_alloc] = Category.UNKNOWN, Reason.NOT_RECORDED
    return events(
        time,
        kind=np.where(is_alloc, Kind.ALLOC, Kind.FREE_COMPLETED),
        device=columns["device"],
        address=columns["address"].view(np.uint64),
        bytes=columns["bytes"],
        operator=operator,
        module=module,
        label=[
            tables.labels.add(block.label) if alloc and block is not None and block.label else -1
            for block, alloc in zip(blocks, is_alloc.tolist(), strict=True)
        ],
        stack=np.where(is_alloc, columns["stack"], -1),
        phase=phase,
        category=category,
        reason=reason,
    )


def _columns(blocks: Sequence[Block | Buffer | None]) -> dict[str, Int64]:
    names = ("device", "bytes", "address", "module", "category", "recomputing", "stack")
    return {name: np.array([getattr(block, name) for block in blocks], np.int64) for name in names}


def _by_lifetime(
    memory: Sequence[Entry],
    rows: np.ndarray,
    columns: dict[str, Int64],
    phase: np.ndarray,
    operator: Int64,
    tables: _Tables,
    phases: Spans,
) -> Judged:
    freed = {id(entry[2]): entry[0] for entry in memory if entry[1] is Happened.FREE}
    forever = np.iinfo(np.int64).max
    born = Born(
        time_ns=np.array([memory[row][0] for row in rows.tolist()], np.int64),
        freed_ns=np.array([freed.get(id(memory[row][2]), forever) for row in rows.tolist()], np.int64),
        device=columns["device"][rows].astype(np.uint8),
        bytes=columns["bytes"][rows],
        phase=phase[rows],
        operator=operator[rows].astype(np.int32),
        operator_end_ns=np.zeros(len(rows), np.int64),
        recomputing=columns["recomputing"][rows].astype(bool),
    )
    return by_lifetime(born, phases, tables.operators.as_tuple(), knows_optimizer=True)
