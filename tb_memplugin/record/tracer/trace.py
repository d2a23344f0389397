"""Make a `MemoryTrace` from a tracer's ledger."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from tb_memplugin.read.categories import Born, by_lifetime, of_known
from tb_memplugin.read.phases import Stretch, phase_at, phase_spans, stretch
from tb_memplugin.read.tables import Call, Mark, Names, Owners, named_phases, operator_name
from tb_memplugin.record.profiler.calls import calls_from, crossings_from_spans
from tb_memplugin.record.provenance import Provenance, find_owners_in_steps, with_later_names
from tb_memplugin.record.storage_lifetimes import BEFORE, Block, Buffer, Entry, EntryKind, Ledger
from tb_memplugin.record.storages import Sighting
from tb_memplugin.record.tensor_metadata import made_tensors
from tb_memplugin.record.tracer.layers import Layers
from tb_memplugin.record.weight_copies import fqns, references
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
from tb_memplugin.trace.notes import Note
from tb_memplugin.trace.tables import Int64, code_mask

SOURCE = "MemoryTracer"

_OF_MODELS = (Category.PARAMETER, Category.BUFFER)

BlockSighting = tuple[Block | Buffer | None, Sighting]
"""A sighting and the block that it saw, None if no operator or start state has shown it."""


@dataclass(slots=True)
class Recorded:
    """What a tracer recorded between two times (epoch nanoseconds), with notes.

    `marks` are the starts and ends of named phases: (epoch ns, name, whether it ends). `sightings` are of
    what entered outermost module calls; `searched` are blocks of the start state that only a search of all
    tensors found.
    """

    layers: Layers
    start_ns: int
    stop_ns: int = 0
    marks: deque[Mark] = field(default_factory=deque)
    sightings: deque[BlockSighting] = field(default_factory=deque)
    searched: list[Block | Buffer] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
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
    memory = [entry for entry in entries if entry[1] <= EntryKind.FREE]
    phases = _phases(recorded.layers)
    before = _before(memory, ledger)
    bare = _events(memory, tables, phases)
    calls = tables.owners.calls(_ended(entries))
    allocs = np.flatnonzero(bare.kind == Kind.ALLOC)
    blocks = [memory[row][2] for row in allocs.tolist()]
    row_of = {id(block): row for row, block in enumerate((*before, *blocks))}
    matched = np.array([row_of.get(id(block), -1) for block, _ in recorded.sightings], np.int64)
    sightings = [sighting for _, sighting in recorded.sightings]
    start = _start_rows(before, tables, {id(block) for block in recorded.searched})
    start = with_later_names(start, matched, sightings, tables.owners, tables.labels)
    nodes = stretch(recorded.layers.nodes)
    provenance = _provenance(bare, allocs, memory, phases, nodes, calls, tables)
    weight_blocks = [block for block in (*before, *blocks) if block and block.category in _OF_MODELS]
    weights = references(list(map(sighting_of, weight_blocks)), fqns(recorded.layers.names))
    provenance.find(sightings, matched - len(before), weights)
    find_owners_in_steps(provenance, recorded.layers.optimizer)
    full = provenance.filled_in(bare, allocs)
    returned = [None if block is None else block.tensor for block in (*before, *blocks)]
    tensor, tensors = made_tensors(returned, np.concatenate((start.bytes, full.bytes[allocs])))
    full.tensor[allocs] = tensor[len(before) :]
    start = replace(start, tensor=tensor[: len(before)])
    devices = tuple(Device(name) for name in ledger.devices) or (Device(ledger.device_type),)
    names = Names()
    return MemoryTrace(
        source=SOURCE,
        events=full,
        start=start,
        devices=devices,
        steps=(Step(0, recorded.start_ns, recorded.stop_ns),),
        operators=tables.operators.as_tuple(),
        labels=tables.labels.as_tuple(),
        tensors=tensors,
        phases=phases,
        calls=calls,
        annotations=named_phases(recorded.marks, full, names),
        annotation_names=names.as_tuple(),
        modules=tables.owners.as_tuple(),
        counters=at_every_moment(len(devices), Counter.SEEN),
        notes=tuple(recorded.notes),
        properties={"torch": torch.__version__, **recorded.properties},
    )


def sighting_of(block: Block | Buffer) -> Sighting:
    """Return what is known of a block as a sighting."""
    return Sighting(0, "", block.address, block.bytes, block.category, block.module, block.label)


def _phases(layers: Layers) -> Spans:
    return phase_spans(
        stretch(layers.forward),
        stretch(layers.backward),
        stretch((step.start_ns, step.end_ns) for step in layers.optimizer),
        np.empty(0, np.int64),
        stretch(layers.making),
    )


def _ended(entries: Sequence[Entry]) -> Iterator[Call]:
    """Yield the layer calls that ended."""
    for time, kind, _, row, phase, _, began in entries:
        if kind is EntryKind.EXIT:
            yield began, time, row, phase


def _before(memory: Sequence[Entry], ledger: Ledger) -> list[Block | Buffer]:
    """Return the blocks whose allocation is not in the kept entries, but that were alive during them."""
    born = {id(entry[2]) for entry in memory if entry[1] is EntryKind.ALLOC}
    ended = (entry[2] for entry in memory if entry[1] is EntryKind.FREE)
    return [block for block in (*ended, *ledger.blocks.values()) if block and id(block) not in born]


def _start_rows(blocks: Sequence[Block | Buffer], tables: _Tables, searched: Set[int]) -> StartState:
    """Return the start state. `searched` are the ids of the blocks that only a search found."""
    category = np.array([_old_category(block) for block in blocks], np.uint8)
    reason = np.where(
        category == [int(block.category) for block in blocks], of_known(category), Reason.IN_FORWARD
    )
    is_searched = np.array([id(block) in searched for block in blocks], bool)
    known_later = code_mask((Category.PARAMETER_COPY, Category.OPTIMIZER_STATE))[category]
    reason[is_searched & ~known_later] = Reason.REACHABLE
    nobody = tables.owners.not_named if any(block.module < 0 for block in blocks) else -1
    return start_state(
        [block.bytes for block in blocks],
        device=[block.device for block in blocks],
        address=np.array([block.address for block in blocks], np.uint64),
        category=category,
        reason=reason,
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
    is_alloc = np.array([entry[1] is EntryKind.ALLOC for entry in memory], bool)
    names: dict[Any, int] = {}
    operator = np.full(len(memory), -1, np.int64)
    for row in np.flatnonzero(is_alloc).tolist():
        made_by = blocks[row].made_by
        number = names.get(made_by)
        if number is None:
            number = names[made_by] = tables.operators.add(operator_name(made_by))
        operator[row] = number
    columns = _columns(blocks)
    # A block may get its owner after its allocation (optimizer state): the alloc event then has it, too.
    module = np.where(is_alloc, columns["module"], [entry[3] for entry in memory])
    loose = is_alloc & (module < 0)
    module[loose] = tables.owners.with_outside(module[loose], operator[loose], tables.operators)
    phase = np.array([entry[4] for entry in memory], np.uint8)
    phase = np.where(phase == Phase.BACKWARD, phase, phase_at(phases, time))
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
    )


def _columns(blocks: Sequence[Block | Buffer | None]) -> dict[str, Int64]:
    names = ("device", "bytes", "address", "module", "stack")
    return {name: np.array([getattr(block, name) for block in blocks], np.int64) for name in names}


def _provenance(
    bare: Events,
    allocs: Int64,
    memory: Sequence[Entry],
    phases: Spans,
    nodes: Stretch,
    calls: Spans,
    tables: _Tables,
) -> Provenance:
    """Return what the ledger and the lifetimes of the allocations (these rows) tell of them.

    Args:
        nodes: when autograd nodes ran.
    """
    freed = {id(entry[2]): entry[0] for entry in memory if entry[1] is EntryKind.FREE}
    forever = np.iinfo(np.int64).max
    blocks = [memory[row][2] for row in allocs.tolist()]
    recomputing = np.array([getattr(block, "recomputing", False) for block in blocks], bool)
    running = calls_from(crossings_from_spans([0] * len(nodes[0]), *nodes), 0)
    node_end = np.append(running.end_ns, 0)[running.at(bare.time_ns[allocs])]
    born = Born(
        time_ns=bare.time_ns[allocs],
        freed_ns=np.array([freed.get(id(block), forever) for block in blocks], np.int64),
        device=bare.device[allocs],
        bytes=bare.bytes[allocs],
        phase=bare.phase[allocs],
        operator=bare.operator[allocs],
        operator_end_ns=np.where(recomputing, 0, node_end),
        recomputing=recomputing,
    )
    operators = tables.operators.as_tuple()
    category = np.array([getattr(block, "category", Category.UNKNOWN) for block in blocks], np.uint8)
    reason = of_known(category)
    unknown = category == Category.UNKNOWN
    by_lifetimes = by_lifetime(born, phases, operators, knows_optimizer=True)
    category[unknown], reason[unknown] = by_lifetimes.category[unknown], by_lifetimes.reason[unknown]
    return Provenance(
        born=born,
        phases=phases,
        calls=calls,
        owners=tables.owners,
        operators=operators,
        labels=tables.labels,
        category=category,
        reason=reason,
        label=bare.label[allocs].copy(),
        module=bare.module[allocs].copy(),
    )
