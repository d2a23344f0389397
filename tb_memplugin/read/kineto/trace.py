"""Read Kineto traces (`*.pt.trace.json`), of any version of PyTorch, as memory traces.

A trace contains allocs and frees of every device with the profiler's counters, out-of-memory events, steps,
operators, named ranges, Python frames and `nn.Module` frames. Kernels and other work on devices are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.read.annotations import annotations_of, with_different_starts
from tb_memplugin.read.categories import Born, Judged, by_lifetime
from tb_memplugin.read.faults import Tally, notes_on
from tb_memplugin.read.kineto.before import with_categories
from tb_memplugin.read.kineto.events import (
    FIX,
    MEMORY_NAMES,
    MemoryRows,
    Threads,
    Written,
    WrittenMemory,
    joined,
    memory_columns,
    read_memory,
)
from tb_memplugin.read.kineto.fields import base_ns
from tb_memplugin.read.kineto.levels import (
    Beginning,
    beginnings,
    counter_readings,
    note_on_invalid,
    notes_on_levels,
    start_of,
)
from tb_memplugin.read.kineto.owners import Owned, owned
from tb_memplugin.read.kineto.ranges import (
    CATEGORIES,
    STEP_PREFIX,
    Ranges,
    WrittenRanges,
    range_columns,
    read_ranges,
)
from tb_memplugin.read.kineto.tensors import tensors_of
from tb_memplugin.read.python_frames import note_on_cut
from tb_memplugin.trace import (
    Allocations,
    Category,
    Device,
    Events,
    Kind,
    MemoryTrace,
    Module,
    Note,
    OutOfMemory,
    Reason,
    Step,
    events,
)
from tb_memplugin.trace.replay import pair
from tb_memplugin.trace.tables import CERTAIN, NO_OPERATOR, NOT_NAMED, Bool, Int64

SOURCE = "kineto"
LONGEST_STEP_NUMBER = 9
PROPERTIES = ("schemaVersion", "record_shapes", "profile_memory", "with_stack", "with_modules", "with_flops")
RECORD = "Record it with torch.profiler.profile(profile_memory=True)."


class WrittenEvents(NamedTuple):
    """The events of a trace that are read, and how many there are in all, and how many are no objects."""

    memory: WrittenMemory
    ranges: WrittenRanges
    no_objects: int


def written_events(batches: Iterable[list[Any]]) -> WrittenEvents:
    """Return what is read of a trace's events, whose objects are needed only one batch at a time."""
    memory, ranges, no_objects = [], [], 0
    inputs: dict[str, Written] = {}
    for batch in chain(([],), batches):
        events = [event for event in batch if type(event) is dict]
        no_objects += len(batch) - len(events)
        memory.append(memory_columns([event for event in events if event.get("name") in MEMORY_NAMES]))
        is_range = [event for event in events if event.get("cat") in CATEGORIES and event.get("ph") == "X"]
        ranges.append(range_columns(is_range, inputs))
    return WrittenEvents(joined(memory), joined(ranges), no_objects)


def trace_from_kineto(content: object, source: str) -> MemoryTrace:
    """Return the memory trace in a Kineto trace in memory.

    Events are in the order of (`ts`, event index). The start state of each device is chosen so that the
    level after every event equals the file's `Total Allocated`; where it does not, a note says how often
    and by how much. Invalid events are left out and counted in notes.

    Args:
        content: the file's JSON: a dict with `traceEvents`, a list or what `written_events` returns, or only
            the list of events.

    Raises:
        UnreadableFileError: the content is not a Kineto trace, or has no memory events or impossible
            numbers.
    """
    written = content.get("traceEvents") if isinstance(content, dict) else content
    if isinstance(written, list):
        written = written_events([written])
    if not isinstance(written, WrittenEvents):
        raise UnreadableFileError("The file does not contain a list of traceEvents.", where=source, fix=FIX)
    head: dict[str, Any] = content if isinstance(content, dict) else {}
    threads = Threads()
    memory = read_memory(written.memory, threads, source)
    if not len(memory.time_ns):
        sizeless = {"memory events have no size; left out": Tally(memory.sizeless)}
        lost = "".join(f" {note}" for note in notes_on({**memory.faults, **sizeless}))
        raise UnreadableFileError(f"The trace contains no memory events.{lost}", where=source, fix=RECORD)
    ranges, around = read_ranges(written.ranges, threads, memory)
    base = base_ns(head.get("baseTimeNanoseconds"), int(memory.time_ns[0]))
    memory = replace(memory, time_ns=memory.time_ns + base)
    ranges = replace(ranges, start_ns=ranges.start_ns + base, end_ns=ranges.end_ns + base)
    steps = _steps(ranges)
    window = Step(0, int(memory.time_ns[0]), int(memory.time_ns[-1]) + 1)
    owners = owned(ranges, around, memory, np.array([step.start_ns for step in steps], np.int64))
    beginning = beginnings(memory)
    trace = _trace(memory, ranges, around, owners, beginning, steps or (window,), _properties(head))
    named = np.flatnonzero(ranges.annotation | ranges.step)
    annotations, names = annotations_of(
        [ranges.name[row] for row in named.tolist()],
        ranges.start_ns[named],
        ranges.end_ns[named],
        len(trace.devices),
        trace.events,
    )
    trace = replace(trace, annotations=annotations, annotation_names=names)
    notes = (
        *note_on_invalid(trace, memory, written.no_objects),
        *notes_on(memory.faults),
        *_notes(trace, ranges.invalid, owners, stepless=not steps),
        *notes_on_levels(trace, memory, beginning),
    )
    return _noted(trace, notes)


def _steps(ranges: Ranges) -> tuple[Step, ...]:
    """Return the profiled steps in time order; of several with the same number, only the first."""
    by_number: dict[int, Step] = {}
    rows = np.flatnonzero(ranges.step)
    for row in rows[np.argsort(ranges.start_ns[rows], kind="stable")].tolist():
        number = ranges.name[row].removeprefix(STEP_PREFIX)
        if number.isascii() and number.isdigit() and len(number) <= LONGEST_STEP_NUMBER:
            step = Step(int(number), int(ranges.start_ns[row]), int(ranges.end_ns[row]))
            by_number.setdefault(step.number, step)
    return with_different_starts(by_number.values())


def _trace(
    memory: MemoryRows,
    ranges: Ranges,
    around: Int64,
    owners: Owned,
    beginning: Sequence[Beginning],
    steps: tuple[Step, ...],
    properties: dict[str, str],
) -> MemoryTrace:
    modules = (*owners.modules, Module(NOT_NAMED))
    # A caching allocator reports whole blocks to the profiler (c10/cuda/CUDACachingAllocator.cpp).
    in_blocks = np.array([Device(name).has_reserved for name in memory.devices], bool)
    start = start_of(beginning, len(modules) - 1, in_blocks)
    bare = _bare_events(memory, owners, in_blocks)
    blocks = pair(bare, start)
    category, reason = judged(memory, owners, blocks)
    tensor, tensors = tensors_of(ranges, around, memory, in_blocks)
    return MemoryTrace(
        source=SOURCE,
        events=replace(bare, category=category, reason=reason, tensor=tensor),
        start=with_categories(start, memory, ranges, owners, category, blocks, in_blocks),
        devices=tuple(Device(name) for name in memory.devices),
        steps=steps,
        operators=owners.operators,
        modules=modules,
        stacks=owners.stacks,
        tensors=tensors,
        phases=owners.phases,
        calls=owners.calls,
        ooms=tuple(
            OutOfMemory(event, int(memory.bytes[event])) for event in np.flatnonzero(memory.oom).tolist()
        ),
        counters=tuple(counter_readings(memory, beginning)),
        properties=properties,
    )


def _bare_events(memory: MemoryRows, owners: Owned, in_blocks: Bool) -> Events:
    """Return the events without categories."""
    kind = np.where(memory.bytes > 0, Kind.ALLOC, Kind.FREE_COMPLETED)
    kind[memory.bytes == 0] = Kind.MARK
    kind[memory.oom] = Kind.OOM
    return events(
        memory.time_ns,
        kind=kind,
        device=memory.device,
        address=memory.address,
        bytes=np.abs(memory.bytes),
        operator=owners.operator,
        module=owners.module,
        module_confidence=owners.module_confidence,
        stack=owners.stack,
        phase=owners.phase,
        reserved=np.where(in_blocks[memory.device], memory.reserved, -1),
        rounded=np.where(in_blocks[memory.device] & (kind == Kind.ALLOC), memory.bytes, -1),
    )


def _properties(head: dict[str, Any]) -> dict[str, str]:
    recorded = {name: head[name] for name in PROPERTIES if type(head.get(name)) in (int, bool)}
    return {name: str(value) for name, value in recorded.items() if abs(value) < 1 << 32}


def _notes(trace: MemoryTrace, invalid: int, owners: Owned, *, stepless: bool) -> Iterator[Note]:
    if invalid:
        nothing = np.array([name == NO_OPERATOR for name in trace.operators], bool)[trace.events.operator]
        size = int(trace.events.bytes[nothing & (trace.events.kind == Kind.ALLOC)].sum())
        yield Note(
            f"{invalid:,} operators and ranges have no name or time; left out: at most {size:,} bytes, those "
            "without an operator, are theirs.",
            "ranges_left_out",
            size,
        )
    if stepless:
        yield Note(
            "The trace has no steps (no schedule, or no prof.step()), so the whole window is shown as one "
            "step.",
            "no_steps",
        )
    yield from _notes_on_inferred(trace)
    if owners.cut_stacks:
        yield note_on_cut(owners.cut_stacks, trace)


def _notes_on_inferred(trace: MemoryTrace) -> Iterator[Note]:
    """Yield notes on what the file does not say, but what follows from it."""
    inferred = (trace.events.kind == Kind.ALLOC) & (trace.events.module_confidence < CERTAIN)
    in_nodes = int(trace.events.bytes[inferred].sum())
    if in_nodes:
        yield Note(
            f"The modules of {in_nodes:,} bytes that autograd allocated are inferred: those of the operators "
            "whose sequence numbers its nodes have.",
            "node_modules_inferred",
            in_nodes,
        )
    before = int(trace.start.bytes[trace.start.category != Category.UNKNOWN].sum())
    if before:
        yield Note(
            f"What {before:,} bytes from before the window are is inferred: gradients have the sizes of "
            "parameters, and the optimizer keeps tensors of these sizes.",
            "start_inferred",
            before,
        )


def _noted(trace: MemoryTrace, notes: tuple[Note, ...]) -> MemoryTrace:
    """Return the trace with notes, keeping its cached derived values."""
    noted = replace(trace, notes=notes)
    for name in ("allocations", "_live"):
        if name in vars(trace):
            vars(noted)[name] = vars(trace)[name]
    return noted


def judged(memory: MemoryRows, owners: Owned, blocks: Allocations) -> Judged:
    """Return the category of each memory row, and why. Rows that are no allocations have none.

    Args:
        memory: the memory rows.
        blocks: the blocks that the rows allocate and free.
    """
    count = len(memory.bytes)
    fresh = np.flatnonzero(blocks.born >= 0)
    born, freed = blocks.born[fresh], blocks.freed[fresh]
    thread = np.append(memory.thread, -1)
    forever = np.iinfo(np.int64).max
    by_lifetimes = by_lifetime(
        Born(
            time_ns=memory.time_ns[born],
            freed_ns=np.append(memory.time_ns, forever)[freed],
            device=memory.device[born],
            bytes=memory.bytes[born],
            phase=owners.phase[born],
            operator=owners.operator[born],
            operator_end_ns=np.where(thread[born] == thread[freed], owners.operator_end_ns[born], 0),
            recomputing=owners.recomputing[born],
        ),
        owners.phases,
        owners.operators,
        knows_optimizer=False,
    )
    category = np.full(count, Category.UNKNOWN, np.uint8)
    reason = np.full(count, Reason.NOT_RECORDED, np.uint8)
    category[born], reason[born] = by_lifetimes
    return Judged(category, reason)
