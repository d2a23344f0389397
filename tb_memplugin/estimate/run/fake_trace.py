"""Convert the ledger of a fake run into a `MemoryTrace`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tb_memplugin.estimate.gpu_spec import GpuSpec
from tb_memplugin.estimate.run.fake_layers import FakeLayers
from tb_memplugin.estimate.run.fake_ledger import FakeLedger
from tb_memplugin.read.categories import Born, by_lifetime, of_known
from tb_memplugin.read.phases import phase_at, phase_spans, stretch
from tb_memplugin.read.tables import Mark, Names, Owners, named_phases, operator_name
from tb_memplugin.record.provenance import with_caches
from tb_memplugin.record.tensor_metadata import made_tensors
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
    Step,
    at_every_moment,
    events,
    start_state,
)
from tb_memplugin.trace.allocator import DEFAULT_POOL, PoolId
from tb_memplugin.trace.notes import Note
from tb_memplugin.trace.tables import Int64

SOURCE = "MemoryEstimator"

_BY_MODELS = (Category.TEMPORARY, Category.WORKSPACE, Category.COMMUNICATION)
"""Categories that only the estimate's models of kernels and libraries give to a block directly."""


@dataclass(slots=True)
class FakeRun:
    """The record of a fake run. All times are epoch nanoseconds.

    `step_ends` are the times at which `step()` was called. `marks` are the beginnings and ends of named
    phases: (time, name, whether it ends).
    """

    ledger: FakeLedger
    layers: FakeLayers
    start_ns: int
    stop_ns: int = 0
    step_ends: list[int] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)


def trace_of(run: FakeRun, gpu: GpuSpec | None, notes: Sequence[str]) -> MemoryTrace:
    """Return the allocations and frees of a fake run, with operator, module, phase, step and category."""
    operators, labels, names = Names(), Names(), Names()
    stacks: dict[tuple[str, ...], int] = {}
    owners = Owners(run.layers.names.modules)
    phases = _phases(run)
    streams, pools = _streams(run), _pools(run)
    full = _events(run, phases, operators, labels, owners, streams, pools, stacks)
    allocs = np.flatnonzero(full.kind == Kind.ALLOC)
    made = [run.ledger.entries[row][2].tensor for row in allocs.tolist()]
    full.tensor[allocs], tensors = made_tensors(made, full.bytes[allocs])
    capacity, product = (None, "") if gpu is None else (gpu.memory_bytes, gpu.name)
    devices = run.ledger.devices or [f"{run.ledger.device_type}:0"]
    trace = MemoryTrace(
        source=SOURCE,
        events=full,
        start=start_state([]),
        devices=tuple(Device(name, capacity, product) for name in devices),
        steps=_steps(run),
        operators=operators.as_tuple(),
        labels=labels.as_tuple(),
        stacks=tuple(stacks),
        tensors=tensors,
        phases=phases,
        calls=owners.calls(run.layers.calls),
        annotations=named_phases(run.marks, full, names),
        annotation_names=names.as_tuple(),
        modules=owners.as_tuple(),
        streams=streams,
        pools=pools,
        counters=at_every_moment(len(devices), Counter.SIMULATED),
        notes=tuple(Note(note, "estimate") for note in notes),
        properties={"torch": torch.__version__},
    )
    return with_caches(trace)


def _steps(run: FakeRun) -> tuple[Step, ...]:
    """Return one step for each call of `step()`, and one more for events after the last call."""
    last = run.ledger.entries[-1][0] if run.ledger.entries else run.start_ns
    ends = list(run.step_ends)
    if not ends or last > ends[-1]:
        ends.append(run.stop_ns)
    starts = [run.start_ns, *ends[:-1]]
    return tuple(Step(number, *span) for number, span in enumerate(zip(starts, ends, strict=True)))


def _phases(run: FakeRun) -> Spans:
    layers = run.layers
    return phase_spans(
        stretch(layers.forward),
        stretch(layers.backward),
        stretch(layers.optimizer),
        np.array(run.step_ends, np.int64),
    )


def _streams(run: FakeRun) -> tuple[int, ...]:
    """Return the pointers of all streams that allocated; none if that was only the default one."""
    streams = {entry[2].stream for entry in run.ledger.entries}
    return () if streams <= {0} else tuple(sorted(streams))


def _pools(run: FakeRun) -> tuple[PoolId, ...]:
    """Return the ids of all pools that were used; none if that was only the default one."""
    pools = {entry[2].pool for entry in run.ledger.entries}
    return () if pools <= {DEFAULT_POOL} else tuple(sorted(pools))


def _events(
    run: FakeRun,
    phases: Spans,
    operators: Names,
    labels: Names,
    owners: Owners,
    streams: tuple[int, ...],
    pools: tuple[PoolId, ...],
    stacks: dict[tuple[str, ...], int],
) -> Events:
    entries = run.ledger.entries
    blocks = [entry[2] for entry in entries]
    time = np.array([entry[0] for entry in entries], np.int64)
    is_alloc = np.array([entry[1] for entry in entries], bool)
    empties = np.array([block.empties_cache for block in blocks], bool)
    rows: dict[Any, int] = {}
    operator = np.full(len(entries), -1, np.int64)
    for row in np.flatnonzero(is_alloc).tolist():
        made_by = blocks[row].made_by
        operator_row = rows.get(made_by)
        if operator_row is None:
            operator_row = rows[made_by] = operators.add(operator_name(made_by))
        operator[row] = operator_row
    # A block may get its owner after it was allocated (optimizer state): its allocation shows that owner.
    modules = np.where(
        is_alloc, _column([block.module for block in blocks]), _column([entry[3] for entry in entries])
    )
    loose = is_alloc & (modules < 0)
    module = modules.astype(np.int32)
    module[loose] = owners.with_outside(modules[loose], operator[loose], operators)
    phase = np.array([entry[4] for entry in entries], np.uint8)
    phase = np.where(phase == Phase.BACKWARD, phase, phase_at(phases, time)).astype(np.uint8)
    device = np.array([block.device for block in blocks], np.uint8)
    size = _column([block.bytes for block in blocks])
    category = np.array([block.category for block in blocks], np.uint8)
    unknown = np.flatnonzero(is_alloc & (category == Category.UNKNOWN))
    born = Born(
        time_ns=time[unknown],
        freed_ns=_column([blocks[row].freed_ns for row in unknown.tolist()]),
        device=device[unknown],
        bytes=size[unknown],
        phase=phase[unknown],
        operator=operator[unknown].astype(np.int32),
        operator_end_ns=np.zeros(len(unknown), np.int64),
        recomputing=np.array([blocks[row].recomputing for row in unknown.tolist()], bool),
    )
    reason = of_known(category)
    reason[np.isin(category, _BY_MODELS)] = Reason.KERNEL_MODEL
    judged = by_lifetime(born, phases, operators.as_tuple(), knows_optimizer=True)
    category[unknown], reason[unknown] = judged
    category[~is_alloc], reason[~is_alloc] = Category.UNKNOWN, Reason.NOT_RECORDED
    return events(
        time,
        kind=np.where(is_alloc, Kind.ALLOC, np.where(empties, Kind.SEGMENT_FREE, Kind.FREE_COMPLETED)),
        device=device,
        address=np.array([block.address for block in blocks], np.uint64),
        bytes=size,
        operator=operator,
        module=module,
        label=[
            labels.add(block.label) if alloc and block.label else -1
            for block, alloc in zip(blocks, is_alloc.tolist(), strict=True)
        ],
        phase=phase,
        category=category,
        reason=reason,
        stack=[stacks.setdefault(block.stack, len(stacks)) if block.stack else -1 for block in blocks],
        stream=[streams.index(block.stream) if streams else -1 for block in blocks],
        pool=[pools.index(block.pool) if pools else -1 for block in blocks],
    )


def _column(values: list[int]) -> Int64:
    return np.array(values, np.int64)
