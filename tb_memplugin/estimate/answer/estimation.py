"""The result of an estimate: how much memory a run takes, whether it fits, and what uses it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from rich.console import Console
from rich.table import Table

from tb_memplugin.analysis.sums import sums
from tb_memplugin.analysis.units import Unit
from tb_memplugin.estimate.answer.hints import EVERY_STEP
from tb_memplugin.estimate.gpu_spec import MIB, GpuSpec
from tb_memplugin.simulator.allocator_settings import AllocatorSettings
from tb_memplugin.simulator.replay import replay
from tb_memplugin.simulator.simulated_trace import simulated_trace
from tb_memplugin.trace import Allocations, Category, Kind, MemoryTrace, Phase
from tb_memplugin.trace.replay import live_levels
from tb_memplugin.trace.tables import Int64


@dataclass(frozen=True, slots=True)
class ModuleMemory:
    """Memory of one module, its submodules included, on the device that needs the most. All sizes are bytes.

    Attributes:
        name: its FQN, `(root)` for the model itself; or `outside:<operator>` for memory that no module owns.
        at_peak_bytes: bytes that it holds at the peak of the device.
        allocated_bytes, allocations: bytes and number of all its allocations during the run.
        peak_bytes: the highest allocated bytes of the device during its calls; 0 if it was not called.
    """

    name: str
    class_name: str
    at_peak_bytes: int
    allocated_bytes: int
    allocations: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class PhaseMemory:
    """A phase named with `track_phase`: allocated bytes before and after it, and the highest in between."""

    name: str
    before_bytes: int
    after_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class TensorCreation:
    """Allocations of one operator: number, total bytes, largest, and bytes live at the peak."""

    operator: str
    count: int
    bytes: int
    largest_bytes: int
    at_peak_bytes: int


def _sizes(trace: MemoryTrace) -> tuple[Int64, Int64, Int64]:
    """Return rows of the fullest device's blocks, their bytes, and their bytes live at the peak (else 0)."""
    blocks = trace.allocations
    device = fullest_device(trace)
    here = np.flatnonzero(blocks.device == device)
    size = allocated_bytes(blocks)[here]
    peak = int(np.argmax(allocated_levels(trace, device))) - 1
    alive = (blocks.born[here] <= peak) & (blocks.freed[here] > peak)
    return here, size, np.where(alive, size, 0)


def module_memory(trace: MemoryTrace) -> tuple[ModuleMemory, ...]:
    """Return the memory of every module, parents before children; a parent includes its children."""
    here, size, at_peak = _sizes(trace)
    owner, count = trace.allocations.module[here].astype(np.int64), len(trace.modules)
    live, asked, number = (sums(owner, sizes, count) for sizes in (at_peak, size, np.ones_like(size)))
    peaks = _peaks(trace)
    for row in range(count - 1, -1, -1):
        parent = trace.modules[row].parent
        if parent >= 0:
            for column in (live, asked, number):
                column[parent] += column[row]
            peaks[parent] = max(peaks[parent], peaks[row])
    return tuple(
        ModuleMemory(
            module.key or "(root)",
            module.class_name,
            *(int(column[row]) for column in (live, asked, number, peaks)),
        )
        for row, module in enumerate(trace.modules)
    )


def _peaks(trace: MemoryTrace) -> Int64:
    """Return, for each row of modules, the highest allocated bytes during its calls."""
    levels, calls = allocated_levels(trace, 0), trace.calls
    peaks = np.zeros(len(trace.modules), np.int64)
    first = np.searchsorted(trace.events.time_ns, calls.start_ns, side="left")
    last = np.searchsorted(trace.events.time_ns, calls.end_ns, side="right")
    if len(calls):
        bounds = np.stack((first, last), axis=1).reshape(-1)
        highest = np.maximum.reduceat(np.append(levels, 0), np.minimum(bounds, len(levels)))[::2]
        highest = np.maximum(highest, levels[np.minimum(last, len(levels) - 1)])
        np.maximum.at(peaks, calls.name, highest)
    return peaks


def tensor_creation(trace: MemoryTrace) -> tuple[TensorCreation, ...]:
    """Return the allocations of every operator, the largest total first."""
    here, size, at_peak = _sizes(trace)
    operator, names = trace.allocations.operator[here].astype(np.int64), trace.operators
    asked, live, number = (sums(operator, sizes, len(names)) for sizes in (size, at_peak, np.ones_like(size)))
    largest = np.zeros(len(names), np.int64)
    np.maximum.at(largest, operator, size)
    order = np.argsort(-asked, kind="stable")
    return tuple(
        TensorCreation(names[row], int(number[row]), int(asked[row]), int(largest[row]), int(live[row]))
        for row in order.tolist()
        if number[row]
    )


BUILDING = "building"
"""The phase in which a program builds its model and inputs: all that precedes the first forward."""

RESERVED_OFF = (-0.0783, 0.0493)
"""How far estimates of reserved memory are below and above that of real runs, as shares of it, at worst.

The lowest is of an H200 (docs/gpu.md), the highest of published peaks (docs/estimate_published.md).
"""

CONTEXT_BYTES = (100 * MIB, 712 * MIB)
"""The least and the most that a CUDA context was seen to take, on any GPU (docs/gpus.md)."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The memory that a run would take on the device that needs the most. All sizes are bytes.

    Attributes:
        peak_allocated_bytes, peak_reserved_bytes: what `torch.cuda.max_memory_allocated` and
            `max_memory_reserved` would return.
        workspace_bytes: the part of it that cuBLAS workspaces take.
        fits: whether every request finds memory on the GPU; None without a GPU.
        margin_bytes: usable memory of the GPU that is not reserved, negative where it does not fit; None
            without a GPU.
        margin_bounds_bytes: the least and the most that `margin_bytes` may be; None without a GPU. See
            `margin_bounds`.
        breakdown: (category, bytes) at the peak of allocated memory, largest first; their sum is the peak.
        phases: (name, highest allocated bytes) of the phases named with `track_phase`, or else of forward,
            backward, optimizer and other.
        seconds: how long the fake run took.
        gpu: the name of the GPU, "" for none.
        notes: what is modelled, and what is not known.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    workspace_bytes: int
    fits: bool | None
    margin_bytes: int | None
    margin_bounds_bytes: tuple[int, int] | None
    breakdown: tuple[tuple[str, int], ...]
    phases: tuple[tuple[str, int], ...]
    seconds: float
    gpu: str
    notes: tuple[str, ...] = field(default=())

    @property
    def verdict(self) -> str | None:
        """Return "fits", "does not fit", or "may fit" if the bounds differ in that; None without a GPU."""
        if self.margin_bounds_bytes is None:
            return None
        least, most = self.margin_bounds_bytes
        return "fits" if least >= 0 else "may fit" if most >= 0 else "does not fit"

    @property
    def margin_text(self) -> str:
        """Return the bounds of the margin in words, such as `with 3.10 to 3.40 GiB to spare`."""
        least, most = self.margin_bounds_bytes or (0, 0)
        unit = Unit.for_bytes([abs(least), abs(most)])
        if least < 0 <= most:
            return f"with between {unit.text(-least)} too little and {unit.text(most)} to spare"
        if most < 0:
            return f"with {unit.show(-most)} to {unit.text(-least)} too little"
        return f"with {unit.show(least)} to {unit.text(most)} to spare"


def fullest_device(trace: MemoryTrace) -> int:
    """Return the row of the device with the highest allocated bytes."""
    peaks = [int(allocated_levels(trace, row).max()) for row in range(len(trace.devices))]
    return peaks.index(max(peaks))


def allocated_levels(trace: MemoryTrace, device: int) -> Int64:
    """Return the bytes of a device's live blocks, as the allocator rounded them.

    int64, shape (events + 1,); entry e + 1 holds after event e.
    """
    blocks = trace.allocations
    return live_levels(blocks, allocated_bytes(blocks), len(trace.events), device)


def allocated_bytes(blocks: Allocations) -> Int64:
    """Return the bytes of each block as the allocator rounded them; as requested where that is not known."""
    return np.where(blocks.rounded >= 0, blocks.rounded, blocks.bytes)


def simulate(trace: MemoryTrace, settings: AllocatorSettings) -> MemoryTrace:
    """Return a fake run's trace with addresses, segments and reserved bytes from a simulated allocator."""
    devices = [row for row, device in enumerate(trace.devices) if device.has_reserved]
    replays = [replay(trace, row, settings, recorded=False) for row in devices]
    return replace(simulated_trace(replays), source=trace.source) if replays else trace


def answer(
    trace: MemoryTrace,
    simulated: MemoryTrace,
    settings: AllocatorSettings,
    gpu: GpuSpec | None,
    named: Sequence[tuple[str, int, int]],
    seconds: float,
    notes: Sequence[str],
    not_counted: int = 0,
) -> Estimate:
    """Compute the result from a fake run's trace, before and after the simulation of the allocator.

    `named` are (name, start, stop) of the phases that the program named; times are epoch nanoseconds.
    `not_counted` are bytes by which what is not known might raise the peak.
    """
    device = fullest_device(simulated)
    levels = allocated_levels(simulated, device)
    reserved = int(levels.max())
    if simulated.devices[device].has_reserved:
        reserved = int(simulated.events.reserved[simulated.events.device == device].max(initial=0))
    fits, margin, fit_notes = _fits(trace, settings, gpu, reserved, device)
    if len(simulated.devices) > 1:
        fit_notes.append(
            f"The estimate is of {trace.devices[device].name}, which needs the most of all devices."
        )
    if not len(simulated.allocations):
        fit_notes.append(
            f"Nothing was allocated on {trace.devices[0].name}: create the model and the inputs there."
        )
    if EVERY_STEP in notes:
        lower = int(levels.max()) - _peak_without_steps(simulated, device)
        skipping = f"{EVERY_STEP} As long as it does, the peak is {lower:,} bytes lower."
        notes = [skipping if note == EVERY_STEP else note for note in notes]
    parts = breakdown(simulated, int(np.argmax(levels)) - 1, device)
    return Estimate(
        peak_allocated_bytes=int(levels.max()),
        peak_reserved_bytes=reserved,
        workspace_bytes=_of_category(simulated, Category.WORKSPACE, device),
        fits=fits,
        margin_bytes=margin,
        margin_bounds_bytes=margin_bounds(gpu, margin, not_counted),
        breakdown=parts,
        phases=_named(simulated, levels, named) or _phases(simulated, levels, device),
        seconds=seconds,
        gpu=gpu.name if gpu is not None else "",
        notes=(*notes, *fit_notes),
    )


def _peak_without_steps(trace: MemoryTrace, device: int) -> int:
    """Return the highest allocated bytes without what optimizers' steps allocate."""
    blocks = trace.allocations
    stepped = (blocks.born >= 0) & (trace.events.phase[blocks.born] == Phase.OPTIMIZER)
    sizes = np.where(stepped, 0, allocated_bytes(blocks))
    return int(live_levels(blocks, sizes, len(trace.events), device).max())


def margin_bounds(gpu: GpuSpec | None, margin: int | None, not_counted: int) -> tuple[int, int] | None:
    """Return between which bytes the margin on a GPU lies, if its estimate is `margin`; None without one.

    Reserved memory is taken to be off as far as it was beside published peaks. The least margin also leaves
    room for the largest CUDA context that was seen and for `not_counted` bytes.
    """
    if gpu is None or margin is None:
        return None
    need = gpu.usable_bytes - margin
    below, above = RESERVED_OFF
    least, most = CONTEXT_BYTES
    context = gpu.context_bytes
    more_context = max(most - (context or 0), 0)
    return (
        gpu.usable_bytes - more_context - not_counted - round(need / (1 + below)),
        gpu.usable_bytes - (least if context is None else 0) - round(need / (1 + above)),
    )


def breakdown(trace: MemoryTrace, event: int, device: int = 0) -> tuple[tuple[str, int], ...]:
    """Return (category, bytes) of the blocks live after an event on a device, largest first."""
    blocks = trace.allocations
    rows = blocks.alive_at(event, device)
    sizes = sums(blocks.category[rows].astype(np.int64), allocated_bytes(blocks)[rows], len(Category))
    parts = [(category.key, int(sizes[category])) for category in Category if sizes[category]]
    return tuple(sorted(parts, key=lambda part: -part[1]))


def _fits(
    trace: MemoryTrace, settings: AllocatorSettings, gpu: GpuSpec | None, reserved: int, device: int
) -> tuple[bool | None, int | None, list[str]]:
    if gpu is None or not trace.devices[device].has_reserved:
        return None, None, []
    notes = [_beside(gpu)]
    room = gpu.usable_bytes
    if reserved <= room:
        return True, room - reserved, notes
    tight = replay(trace, device, settings, room, recorded=False)
    if tight.failure is not None:
        return False, room - reserved, notes
    notes.append(
        "It fits only because the allocator frees unused segments when memory runs out, which is slow."
    )
    return True, room - int(tight.reserved.max()), notes


def _beside(gpu: GpuSpec) -> str:
    if gpu.context_bytes is None:
        return "Not counted: the CUDA context (docs/gpus.md) and other programs on the GPU."
    return (
        f"{gpu.context_bytes >> 20:,} MiB of the GPU's memory are set aside for the CUDA context: the "
        "least that was seen on this GPU (docs/gpus.md). Other programs, and what the program's own "
        "kernels add, are not counted."
    )


def _of_category(trace: MemoryTrace, category: Category, device: int) -> int:
    blocks = trace.allocations
    mine = (blocks.category == category) & (blocks.device == device)
    return int(blocks.bytes[mine].sum())


def _named(
    trace: MemoryTrace, levels: Int64, named: Sequence[tuple[str, int, int]]
) -> tuple[tuple[str, int], ...]:
    """Return (name, highest allocated bytes) of each named phase, blocks counted with their rounded sizes."""
    spans = np.array([span for _, *span in named], np.int64).reshape(-1, 2)
    times = trace.events.time_ns
    first, last = np.searchsorted(times, spans[:, 0]), np.searchsorted(times, spans[:, 1], "right")
    return tuple(
        (name, int(levels[begin : end + 1].max()))
        for (name, *_), begin, end in zip(named, first.tolist(), last.tolist(), strict=True)
    )


def _phases(trace: MemoryTrace, levels: Int64, device: int) -> tuple[tuple[str, int], ...]:
    """Return (name, highest allocated bytes) of the phases; what precedes the first forward is building."""
    events = trace.events
    allocates = (events.kind == Kind.ALLOC) & (events.device == device)
    forward = np.flatnonzero(events.phase == Phase.FORWARD)
    before = np.arange(len(events)) < (int(forward[0]) if len(forward) else 0)
    parts = [(BUILDING, before)]
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.OTHER):
        parts.append((phase.key, (events.phase == phase) & ~before))
    return tuple(
        (name, int(levels[np.flatnonzero(rows & allocates) + 1].max()))
        for name, rows in parts
        if (rows & allocates).any()
    )


_ROWS = 30


def print_estimate(estimate: Estimate, out: Console) -> None:
    """Print the peak, whether it fits, its parts by category, the phases and the notes."""
    unit = Unit.for_bytes([estimate.peak_reserved_bytes])
    out.print(
        f"Peak allocated {unit.text(estimate.peak_allocated_bytes)}, "
        f"reserved {unit.text(estimate.peak_reserved_bytes)} ({estimate.seconds:.1f} s)",
        markup=False,
    )
    if estimate.verdict is not None:
        out.print(f"On {estimate.gpu} it {estimate.verdict}, {estimate.margin_text}.", markup=False)
    parts = Table("at the peak", unit.name, "share")
    for name, size in estimate.breakdown:
        parts.add_row(
            name.replace("_", " "), unit.show(size), f"{size / max(estimate.peak_allocated_bytes, 1):.1%}"
        )
    out.print(parts)
    for name, size in estimate.phases:
        out.print(f"phase {name}: peak {unit.text(size)}", markup=False)
    for note in estimate.notes:
        out.print(f"note: {note}", markup=False)


def print_modules(modules: Sequence[ModuleMemory], out: Console) -> None:
    """Print the modules that hold the most memory at the peak."""
    order = sorted(modules, key=lambda module: -module.at_peak_bytes)
    unit = Unit.for_bytes(module.peak_bytes for module in modules)
    table = Table(
        "module",
        "class",
        f"at the peak ({unit.name})",
        f"peak while it ran ({unit.name})",
        f"allocated ({unit.name})",
        "allocations",
    )
    for module in order[:_ROWS]:
        table.add_row(
            _plain(module.name),
            _plain(module.class_name),
            unit.show(module.at_peak_bytes),
            unit.show(module.peak_bytes) if module.peak_bytes else "",
            unit.show(module.allocated_bytes),
            f"{module.allocations:,}",
        )
    _print(table, len(order), "modules", out)


def print_tensors(tensors: Sequence[TensorCreation], out: Console) -> None:
    """Print the operators in the given order, at most 30."""
    unit = Unit.for_bytes(creation.bytes for creation in tensors)
    table = Table(
        "operator",
        "tensors",
        f"allocated ({unit.name})",
        f"largest ({unit.name})",
        f"at the peak ({unit.name})",
    )
    for creation in tensors[:_ROWS]:
        table.add_row(
            _plain(creation.operator),
            f"{creation.count:,}",
            unit.show(creation.bytes),
            unit.show(creation.largest_bytes),
            unit.show(creation.at_peak_bytes),
        )
    _print(table, len(tensors), "operators", out)


def _print(table: Table, count: int, noun: str, out: Console) -> None:
    out.print(table)
    if count > _ROWS:
        out.print(f"... and {count - _ROWS:,} more {noun}", markup=False)


def _plain(name: str) -> str:
    return name.replace("[", r"\[")
