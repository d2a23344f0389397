"""Make a `MemoryTrace` from a finished torch.profiler window."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.ma  # np.unique imports it at its first call: better here than while a training waits
import torch

from tb_memplugin.analysis.units import counted
from tb_memplugin.errors import MemPluginError, NotRecordedError
from tb_memplugin.read.annotations import annotations_of
from tb_memplugin.read.categories import Born, by_lifetime, workspaces
from tb_memplugin.read.python_frames import note_on_cut
from tb_memplugin.read.tables import Names
from tb_memplugin.record.profiler.attribution import Attribution, Logged, attribute, main_thread
from tb_memplugin.record.profiler.counters import counter_readings
from tb_memplugin.record.profiler.memory_events import (
    MemoryEvents,
    beside_counters,
    read_memory_events,
    with_counted_calls,
    with_events_outside,
)
from tb_memplugin.record.profiler.node_owners import forward_threads
from tb_memplugin.record.profiler.roles import STEP_PREFIX, Role
from tb_memplugin.record.profiler.stacks import ProfiledStacks, stacks_of
from tb_memplugin.record.profiler.start_state import start_state
from tb_memplugin.record.profiler.tree import walk
from tb_memplugin.record.profiler.tree_columns import ProfilerTree
from tb_memplugin.record.profiler.window import Window
from tb_memplugin.record.provenance import Provenance, find_owners_in_steps, with_later_names
from tb_memplugin.record.storages import dtype_properties, match_sightings
from tb_memplugin.record.tensor_metadata import OperatorTensors, seen_in, seen_tensors
from tb_memplugin.record.torch_private.profiler import adjusts_timestamps
from tb_memplugin.record.weight_copies import fqns, held_copies, references
from tb_memplugin.record.whole_device.window import whole_devices
from tb_memplugin.trace import (
    Allocations,
    Annotations,
    Category,
    Device,
    Events,
    Kind,
    MemoryTrace,
    Note,
    Reason,
    StartState,
    Step,
    TensorMetadata,
    events,
)
from tb_memplugin.trace.notes import STEP_NOT_ENDED
from tb_memplugin.trace.replay import attributed, frees_of_unknown, pair, unreported_frees
from tb_memplugin.trace.tables import Int64, merged


def trace_from_profile(prof: torch.profiler.profile, window: Window, number: int = 0) -> MemoryTrace:
    """Return the trace of everything that a profile and the record of its window contain about memory.

    This reads the profile's event tree and does not change the profile: other handlers can export it.

    Args:
        prof: a profile whose window has just ended (as `on_trace_ready` receives it).
        number: the step's number if the profile has no steps.

    Raises:
        MemPluginError: the profile was not stopped, has no memory events, or not the true times.
    """
    logged = Logged.of(window)
    received = OperatorTensors() if getattr(prof, "record_shapes", False) else None
    results, tree = _walked(prof, window, logged, received)
    calls = window.counted.calls if window.counted is not None else None
    memory = read_memory_events(tree)
    if calls is not None:
        memory = with_counted_calls(memory, calls)
    has_steps = Role.STEP in tree.ranges
    memory = with_events_outside(memory, results.events, window.blocks, window.sightings, has_steps=has_steps)
    on_steps: list[Note] = []
    steps = _steps(tree, window, number, on_steps)
    if has_steps:
        steps = _without_rest(steps, tree, prof, memory, on_steps)
    threads, roots = (lambda: forward_threads(results.events())), results.experimental_event_tree
    attribution = attribute(tree, memory, window, logged, steps, threads, roots)
    devices, labels = _all_devices(memory, window), Names()
    window.start = held_copies(window.start, fqns(window.names))
    start, notes = start_state(window, memory, devices, attribution.owners, labels)
    called = stacks_of(tree, memory, main_thread(tree))
    quiet = () if calls is None else ("cpu",)  # the calls have these frees already
    bare, emptied = _with_storage_frees(_bare_events(memory, attribution, called), window, devices, quiet)
    bare, blocks, ended = _paired(bare, start, attribution, devices, window)
    matched = match_sightings(window.sightings, devices, blocks, bare.time_ns)
    start = with_later_names(start, matched, window.sightings, attribution.owners, labels)
    full = categorised(bare, blocks, matched - len(start), attribution, window, devices, labels)
    start, full, tensors = _with_tensors(start, full, blocks, window, received)
    annotations, annotation_names = _annotations(tree, len(devices), full)
    not_counted = _not_in_curve_bytes(window, matched), _unseen_at_end(window, blocks, len(full), devices)
    freed = _freed_elsewhere(window, blocks, full, devices) if attribution.unseen_calls else 0
    trace = MemoryTrace(
        source="torch.profiler",
        events=full,
        start=start,
        devices=tuple(_device(name) for name in devices),
        steps=steps,
        operators=attribution.operators.as_tuple(),
        modules=attribution.owners.as_tuple(),
        labels=labels.as_tuple(),
        stacks=called.stacks,
        tensors=tensors,
        phases=attribution.phases,
        calls=attribution.calls,
        annotations=annotations,
        annotation_names=annotation_names,
        counters=counter_readings(window, memory, devices, *not_counted, freed),
        properties={"torch": torch.__version__, **dtype_properties([*window.start, *window.sightings])},
    )
    blocks = attributed(blocks, full, start)
    vars(trace)["allocations"] = blocks
    return replace(
        trace,
        notes=(
            *window.problems,
            *_open_problems(trace, window, matched),
            *on_steps,
            *([ended] if ended else ()),
            *window.notes,
            *notes,
            *beside_counters(memory),
            *_not_in_curve(window, matched),
            *_on_unseen_calls(attribution.unseen_calls, window, memory),
            *_on_unreported_frees(trace, emptied),
            *_notes(trace, tree, called),
        ),
        whole_devices=whole_devices(window.whole_at_start, window.whole_at_stop, trace),
        paired=blocks,
    )


def _paired(
    bare: Events, start: StartState, attribution: Attribution, devices: Sequence[str], window: Window
) -> tuple[Events, Allocations, Note | None]:
    """Return the events with frees of communication that torch does not report, their blocks, and a note."""
    blocks = pair(bare, start)
    if window.counted is not None or "cpu" not in devices or not attribution.communicating.any():
        return bare, blocks, None
    cpu = devices.index("cpu")
    bare, ended = with_communication_frees(bare, blocks, attribution, cpu, window.alive_at_end)
    return bare, pair(bare, start) if ended else blocks, ended


def _walked(
    prof: torch.profiler.profile, window: Window, logged: Logged, received: OperatorTensors | None
) -> tuple[Any, ProfilerTree]:
    """Return the results of a profile, and what a walk over its event tree found.

    Raises:
        MemPluginError: the profile was not stopped, has no memory events, or not the true times.
    """
    if adjusts_timestamps(getattr(prof, "experimental_config", None)):
        raise MemPluginError(
            "The profile has no true times, by which blocks get their modules and categories.",
            where="torch.profiler.profile(...)",
            fix="Leave adjust_timestamps out of experimental_config. It is for Vulkan.",
        )
    results = getattr(prof.profiler, "kineto_results", None)
    if results is None:
        raise NotRecordedError(
            "The profile has no results.", where="torch.profiler.profile", fix="Stop it first."
        )
    tree = walk(
        results.experimental_event_tree(),
        module_entries=[time for time, row, _, _ in window.crossings if row >= 0],
        outer_calls=logged.outer_calls(window.thread),
        keep_fields=torch.accelerator.is_available(),
        with_stack=bool(getattr(prof, "with_stack", False)),
        tensors=received,
    )
    if not tree.memory and window.is_second:
        raise MemPluginError(
            "Another profiler began within this window and took its events, so nothing was written.",
            where="torch.profiler.profile(...)",
            fix="End one profile before the next begins: torch records for one at a time on each thread.",
        )
    if not tree.memory:
        raise NotRecordedError(
            "The profile contains no memory events, so nothing was written.",
            where="torch.profiler.profile(...)",
            fix="Let the loop reach the active steps of the schedule, and allocate memory there, on the "
            "thread that starts the profiler. (On a GPU, snapshot=True records all threads.) With "
            "profile_all_threads or trace_only in experimental_config, torch keeps no memory events."
            if getattr(prof, "profile_memory", False)
            else "Pass profile_memory=True.",
        )
    return results, tree


def _with_tensors(
    start: StartState, full: Events, blocks: Allocations, window: Window, received: OperatorTensors | None
) -> tuple[StartState, Events, tuple[TensorMetadata, ...]]:
    """Return start state and events with the tensors in their blocks, and the table of these.

    What models and optimizers hold comes before what operators received: views of it have other shapes.
    """
    operators = () if received is None else received.tensors()
    in_use = itertools.chain(seen_in(window.start), seen_in(window.sightings), operators)
    tensor, tensors = seen_tensors(in_use, blocks, full.time_ns)
    of_events = full.tensor.copy()
    of_events[blocks.born[len(start) :]] = tensor[len(start) :]
    return replace(start, tensor=tensor[: len(start)]), replace(full, tensor=of_events), tensors


def _annotations(tree: ProfilerTree, devices: int, events: Events) -> tuple[Annotations, tuple[str, ...]]:
    """Return the named ranges of all threads, without calls of modules, and their names."""
    named = (ranges for role, ranges in tree.ranges.items() if role is not Role.MODULE)
    spans = sorted(itertools.chain.from_iterable(named), key=itemgetter(1))
    start, end = (np.array([span[column] for span in spans], np.int64) for column in (1, 2))
    return annotations_of([name for name, _, _ in spans], start, end, devices, events)


def _steps(tree: ProfilerTree, window: Window, number: int, notes: list[Note]) -> tuple[Step, ...]:
    ranges = tree.ranges.get(Role.STEP)
    if not ranges:
        return (Step(number, window.start_ns, window.stop_ns),)
    steps = [Step(int(name.removeprefix(STEP_PREFIX)), start, end) for name, start, end in ranges]
    return _numbered_once(sorted(steps, key=lambda step: step.start_ns), notes)


def _without_rest(
    steps: tuple[Step, ...],
    tree: ProfilerTree,
    prof: torch.profiler.profile,
    memory: MemoryEvents,
    notes: list[Note],
) -> tuple[Step, ...]:
    """Return steps without a last one that `profile.step` began and nothing followed.

    A note tells of another that did not end: its number is the profile's, which counts at each end.
    """
    last, (name, _, _) = steps[-1], max(tree.ranges[Role.STEP], key=itemgetter(1))
    if name != f"{STEP_PREFIX}{prof.step_num}":
        return steps
    began_by_itself = prof.record_steps and len(steps) > 1
    if began_by_itself and not (memory.bytes[memory.time_ns >= last.start_ns] > 0).any():
        return steps[:-1]
    notes.append(
        Note(
            f"Step {last.number} did not end: the program or its profile ended within it. What is alive at "
            "its end is not what a step leaves.",
            STEP_NOT_ENDED,
        )
    )
    return steps


def _numbered_once(steps: Sequence[Step], notes: list[Note]) -> tuple[Step, ...]:
    """Return steps in time order with unique numbers: of several with the same number, the last keeps it.

    Lightning's PyTorchProfiler counts validation and training steps separately, but profiles both in one
    window.
    """
    free = itertools.count(max(step.number for step in steps) + 1)
    numbers: set[int] = set()
    numbered: list[Step] = []
    for step in reversed(steps):
        number = next(free) if step.number in numbers else step.number
        numbers.add(number)
        numbered.append(Step(number, step.start_ns, step.end_ns))
        if number != step.number:
            notes.append(
                Note(
                    f"The profile has several steps {step.number}: an earlier one is shown as {number}.",
                    "steps_renumbered",
                )
            )
    return tuple(reversed(numbered))


def _all_devices(memory: MemoryEvents, window: Window) -> tuple[str, ...]:
    """Return the devices with events (in the order of `memory.devices`), then those with only storages."""
    quiet = sorted({sighting.device for sighting in window.start} - set(memory.devices))
    return (*memory.devices, *quiet)


def _bare_events(memory: MemoryEvents, attribution: Attribution, called: ProfiledStacks) -> Events:
    """Return the profiler's events with attribution and stacks for allocs, but without categories."""
    none = np.full(len(memory.bytes), -1, np.int32)
    phase = np.zeros(len(none), np.uint8)
    operator, module, stack, forward = (none.copy() for _ in range(4))
    phase[attribution.row], operator[attribution.row], module[attribution.row] = (
        attribution.phase,
        attribution.operator,
        attribution.module,
    )
    stack[attribution.row], forward[attribution.row] = called.stack, called.forward
    return events(
        memory.time_ns,
        kind=np.where(memory.bytes > 0, Kind.ALLOC, Kind.FREE_COMPLETED),
        device=memory.device,
        address=memory.address,
        bytes=np.abs(memory.bytes),
        operator=operator,
        module=module,
        stack=stack,
        forward=forward,
        phase=phase,
        reserved=memory.reserved,
    )


def _with_storage_frees(
    bare: Events, window: Window, devices: tuple[str, ...], without: tuple[str, ...] = ()
) -> tuple[Events, list[int]]:
    """Add the frees of start-state storages, each before the profiler's own event for it.

    Args:
        without: devices whose frees are all among the events.

    Returns:
        the events, and the bytes of each of these storages whose end may have been before.
    """
    emptied = [free for free in _emptied(bare, window) if window.start[free[1]].device not in without]
    freed = [(when, storage.row) for storage, when in window.frees.copy().items()]
    frees = [free for free in freed if window.start[free[1]].device not in without] + emptied
    sizes = [window.start[row].bytes for _, row in emptied]
    if not frees:
        return bare, sizes
    time = np.array([when for when, _ in frees], np.int64)
    sightings = [window.start[row] for _, row in frees]
    added = events(
        time,
        kind=np.full(len(time), Kind.STORAGE_FREE),
        device=[devices.index(sighting.device) for sighting in sightings],
        address=np.array([sighting.address for sighting in sightings], np.uint64),
        bytes=[sighting.bytes for sighting in sightings],
    )
    return merged(added, bare), sizes


def _emptied(bare: Events, window: Window) -> list[tuple[int, int]]:
    """Return (time, row) of start-state storages that were resized to 0 and perhaps filled elsewhere.

    The time is that of the new allocation if there is one, else that of the last event. Storages whose
    address was allocated again are left out: that alloc already ends them.
    """
    if not window.moved:
        return []
    allocs = np.flatnonzero(bare.kind == Kind.ALLOC)
    times = dict(zip(bare.address[allocs].tolist(), bare.time_ns[allocs].tolist(), strict=True))
    left = [(row, address) for row, address in window.moved if window.start[row].address not in times]
    return [(times.get(address, int(bare.time_ns[-1])), row) for row, address in left]


def _not_in_curve(window: Window, matched: Int64) -> list[Note]:
    """Return a note on storages that were seen in use, but that no block of the trace is.

    Storages that a problem of the window counts already are left out.
    """
    elsewhere = window.in_problems | window.foreign
    size = sum(_not_in_curve_bytes(window, matched, inputs=True, without=elsewhere).values())
    if not size:
        return []
    note = Note(
        f"{size:,} bytes of inputs, parameters, gradients or optimizer state are not in the curve: they were "
        "seen in this window, but the profiler did not report where they came from. They were alive before, "
        "and their model or optimizer was not given to memory_trace_handler, or they were something else "
        "then (a state dict, a bucket of gradients). Or another thread made them.",
        "not_in_curve",
        size,
    )
    return [note]


def _not_in_curve_bytes(
    window: Window, matched: Int64, *, inputs: bool = False, without: Set[tuple[str, int]] = frozenset()
) -> dict[str, int]:
    """Return the bytes by device of storages seen in use that no block of the trace is.

    Args:
        inputs: whether to count inputs, too: when they end is not known, so they need not add up.
        without: (device name, address) of storages that are not counted.
    """
    unknown = {
        (sighting.device, sighting.address): sighting.bytes
        for sighting, row in zip(window.sightings, matched.tolist(), strict=True)
        if row < 0 and (inputs or sighting.category is not Category.INPUT)
    }
    sizes: Counter[str] = Counter()
    for device, address in unknown.keys() - without:
        sizes[device] += unknown[device, address]
    return sizes


def _unseen_at_end(window: Window, blocks: Allocations, events: int, devices: Sequence[str]) -> int:
    """Return at least how many of the CPU's bytes Python has at the end that no block of the trace is.

    The buckets of gradients from before the window have no addresses there: they may be among these bytes.
    """
    if window.alive_at_end is None or "cpu" not in devices:
        return 0
    alive = blocks.alive_at(events - 1, devices.index("cpu"))
    addresses = set(blocks.address[alive].tolist())
    unseen = sum(size for address, size in window.alive_at_end.items() if address not in addresses)
    return max(0, unseen - int(blocks.bytes[alive[blocks.address[alive] == 0]].sum()))


def _freed_elsewhere(window: Window, blocks: Allocations, full: Events, devices: Sequence[str]) -> int:
    """Return the bytes of the CPU's inputs that count at the end and that Python does not have.

    Perhaps threads that the profiler does not see have freed them.
    """
    if window.alive_at_end is None or "cpu" not in devices:
        return 0
    alive = blocks.alive_at(len(full) - 1, devices.index("cpu"))
    inputs = alive[(blocks.born[alive] >= 0) & (full.category[blocks.born[alive]] == Category.INPUT)]
    gone = ~np.isin(blocks.address[inputs], np.fromiter(window.alive_at_end, np.uint64))
    return int(blocks.bytes[inputs[gone]].sum())


def _open_problems(trace: MemoryTrace, window: Window, matched: Int64) -> Iterator[Note]:
    """Yield each problem whose bytes were not known before, with what trace and window tell."""
    if not window.open_problems:
        return
    blocks = trace.allocations
    is_module = np.array([module.is_module for module in trace.modules] + [False], bool)
    nameless = int(blocks.bytes[~is_module[blocks.module]].sum())
    lost = sum(_not_in_curve_bytes(window, matched).values())
    for problem in window.open_problems:
        yield Note(
            f"{problem} At most {nameless:,} bytes, those without a module, lack a name for it; at least "
            f"{lost:,} bytes, which were seen in use, are not in the curve.",
            "recording_failed",
            nameless + lost,
        )


def _on_unseen_calls(calls: Mapping[int, int], window: Window, memory: MemoryEvents) -> Iterator[Note]:
    """Yield a note on module calls on threads without events: their bytes as the allocator's calls tell them.

    Where these are not counted, the results of the calls are all that is known.
    """
    if not calls:
        return
    results = sum(window.results.get(ident, 0) for ident in calls)
    ran = f"{counted(sum(calls.values()), 'module call')} ran on threads that the profiler does not see"
    if window.counted is None:
        yield Note(
            f"{ran}: what they allocated is not in the curve. Their results alone have {results:,} bytes: at "
            "least these, each while it lived, are missing.",
            "unseen_calls",
            results,
        )
    else:
        size = memory.bytes[memory.thread < 0]
        most = int(size[size > 0].sum())
        yield Note(
            f"{ran}: what they allocated, at most {most:,} bytes, is in the curve without a module.",
            "unseen_calls",
            most,
        )


def _on_unreported_frees(trace: MemoryTrace, emptied: list[int]) -> Iterator[Note]:
    """Yield a note on blocks, and emptied storages of the start state, whose frees were not reported."""
    unreported = trace.allocations.bytes[unreported_frees(trace.events, trace.allocations)]
    sizes = [size for size in (*unreported.tolist(), *emptied) if size]
    if size := sum(sizes):
        yield Note(
            f"Freed without a report from the profiler: {counted(len(sizes), 'block')} ({size:,} bytes), "
            "by another thread, or by resizing a storage that is older than the window. They count as freed "
            "when their address was used again, or when the resized storage got its last memory.",
            "unseen_frees",
            size,
        )


def _notes(trace: MemoryTrace, tree: ProfilerTree, called: ProfiledStacks) -> list[Note]:
    blocks, full = trace.allocations, trace.events
    notes: list[Note] = []
    reported = frees_of_unknown(full, blocks)
    size = int(full.bytes[reported].sum())
    if size:
        notes.append(
            Note(
                f"Freed in the window, but not seen before: {counted(len(reported), 'block')} ({size:,} "
                "bytes by the profiler's count). They are from before the window, or another thread made "
                "them; they are no parameters, buffers, gradients or optimizer state, and not in the curve.",
                "freed_from_before",
                size,
            )
        )
    if called.cut:
        notes.append(note_on_cut(called.cut, trace))
    if Role.STEP not in tree.ranges:
        notes.append(
            Note(
                "The profile has no steps (no schedule, or no prof.step()), so the whole window is shown "
                "as one step.",
                "no_steps",
            )
        )
    return notes


def _device(name: str) -> Device:
    if name.startswith("cuda") and torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(name)
        return Device(name, int(properties.total_memory), str(properties.name))
    return Device(name)


def categorised(
    bare: Events,
    blocks: Allocations,
    matched: Int64,
    attribution: Attribution,
    window: Window,
    devices: tuple[str, ...],
    labels: Names,
) -> Events:
    """Fill in categories, their reasons and labels, and owners of optimizer memory.

    `matched` is, for each sighting of the window, the number of the alloc that it saw, negative for none.
    """
    fresh = slice(int(np.count_nonzero(blocks.born < 0)), None)
    forever = np.iinfo(np.int64).max
    rows = blocks.born[fresh]
    born = Born(
        time_ns=bare.time_ns[rows],
        freed_ns=np.append(bare.time_ns, forever)[blocks.freed[fresh]],
        device=blocks.device[fresh],
        bytes=blocks.bytes[fresh],
        phase=bare.phase[rows],
        operator=bare.operator[rows],
        operator_end_ns=attribution.operator_end_ns,
        recomputing=attribution.recomputing,
    )
    names = attribution.operators.as_tuple()
    category, reason = by_lifetime(born, attribution.phases, names, knows_optimizer=window.knows_optimizers)
    category[attribution.communicating], reason[attribution.communicating] = (
        Category.COMMUNICATION,
        Reason.SHARDING,
    )
    by_size = workspaces(born, devices, names, window.stop_ns)
    category[by_size], reason[by_size] = Category.WORKSPACE, Reason.SIZE
    provenance = Provenance(
        born=born,
        phases=attribution.phases,
        calls=attribution.calls,
        owners=attribution.owners,
        operators=names,
        labels=labels,
        category=category,
        reason=reason,
        label=np.full(len(rows), -1, np.int32),
        module=bare.module[rows].copy(),
    )
    weights = references([*window.start, *window.sightings], fqns(window.names))
    provenance.find(window.sightings, matched, weights)
    find_owners_in_steps(provenance, window.optimizer_steps)
    return provenance.filled_in(bare, rows)


def with_communication_frees(
    bare: Events, blocks: Allocations, attribution: Attribution, cpu: int, alive: Collection[int] | None
) -> tuple[Events, Note | None]:
    """Return the events with a free for each block of communication that another thread freed, and a note.

    gloo's threads may drop the last reference to a buffer that they sent or received, which the profiler does
    not see. Such a block would be counted until its address is used again, or for ever. The note is None if
    there are none.

    A block counts only until the operator ends that allocated it, so that no freed block is counted; the note
    says how many bytes may be missing at a time.

    Args:
        cpu: the row of the CPU among the devices.
        alive: the addresses of the storages that Python has at the end, None if they were not searched.
    """
    here = blocks.device[blocks.born >= 0] == cpu
    rows = np.flatnonzero(blocks.born >= 0)[here]
    communicating = np.isin(blocks.bytes[rows], blocks.bytes[rows[attribution.communicating[here]]])
    kept = blocks.freed[rows] >= len(bare)
    lost = ~kept & (bare.kind[np.minimum(blocks.freed[rows], len(bare) - 1)] == Kind.ALLOC)
    if alive is not None:
        lost |= kept & communicating & ~np.isin(blocks.address[rows], np.fromiter(alive, np.uint64))
    if not lost.any():
        return bare, None
    born_ns = bare.time_ns[blocks.born[rows]]
    ended_ns = np.append(bare.time_ns, bare.time_ns[-1])[blocks.freed[rows]]
    end_ns = np.minimum(np.maximum(attribution.operator_end_ns[here], born_ns), ended_ns)[lost]
    order = np.argsort(end_ns, kind="stable")
    frees = events(
        end_ns[order],
        kind=np.full(len(end_ns), Kind.FREE_COMPLETED),
        device=np.full(len(end_ns), cpu),
        address=blocks.address[rows[lost]][order],
        bytes=blocks.bytes[rows[lost]][order],
    )
    missing = _most_at_once(end_ns, ended_ns[lost], blocks.bytes[rows[lost]])
    # At equal times the free comes after its own alloc and before the alloc that uses its address again.
    return merged(bare, frees), Note(
        "Freed by threads of the communication, at times that the profiler does not see: "
        f"{counted(len(end_ns), 'block')}. They count only while the operator ran that allocated them, so "
        f"that up to {missing:,} bytes may be missing at a time. Pass exact_cpu=True to see every free.",
        "freed_by_communication",
        missing,
    )


def _most_at_once(begin: Int64, end: Int64, size: Int64) -> int:
    """Return the most bytes of ranges of time that overlap."""
    times = np.concatenate((begin, end))
    order = np.lexsort((np.concatenate((size, -size)), times))
    return int(np.cumsum(np.concatenate((size, -size))[order]).max(initial=0))
