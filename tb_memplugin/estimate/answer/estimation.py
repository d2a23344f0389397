"""The result of an estimate: how much memory a run takes, whether it fits, and what uses the memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tb_memplugin.analysis.units import Unit
from tb_memplugin.estimate.gpu_spec import MIB, GpuSpec
from tb_memplugin.simulator.allocator_settings import AllocatorSettings
from tb_memplugin.simulator.replay import Replay, replay
from tb_memplugin.simulator.simulated_trace import simulated_trace
from tb_memplugin.trace import Category, Kind, MemoryTrace, Phase
from tb_memplugin.trace.tables import Int64

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
    """The memory that a run would take on the first device. All sizes are bytes.

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


def allocated_levels(trace: MemoryTrace, device: int) -> Int64:
    """Return the bytes of a device's live blocks, as the allocator rounded them.

    int64, shape (events + 1,); entry e + 1 holds after event e.
    """
    blocks, count = trace.allocations, len(trace.events)
    here = blocks.device == device
    size = np.where(blocks.rounded >= 0, blocks.rounded, blocks.bytes)[here]
    born, freed = blocks.born[here], blocks.freed[here]
    delta = np.zeros(count + 2, np.int64)
    np.add.at(delta, born + 1, size)
    np.subtract.at(delta, freed[freed < count] + 1, size[freed < count])
    return np.cumsum(delta[:-1])


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
    levels = allocated_levels(simulated, 0)
    reserved = _reserved_peak(simulated) if simulated.devices[0].has_reserved else int(levels.max())
    fits, margin, fit_notes = _fits(trace, settings, gpu, reserved)
    if not len(simulated.allocations):
        fit_notes.append(
            f"Nothing was allocated on {trace.devices[0].name}: create the model and the inputs there."
        )
    parts = breakdown(simulated, int(np.argmax(levels)) - 1)
    return Estimate(
        peak_allocated_bytes=int(levels.max()),
        peak_reserved_bytes=reserved,
        workspace_bytes=_of_category(simulated, Category.WORKSPACE),
        fits=fits,
        margin_bytes=margin,
        margin_bounds_bytes=margin_bounds(gpu, margin, not_counted),
        breakdown=parts,
        phases=_named(simulated, levels, named) or _phases(simulated, levels),
        seconds=seconds,
        gpu=gpu.name if gpu is not None else "",
        notes=(*notes, *fit_notes),
    )


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


def breakdown(trace: MemoryTrace, event: int) -> tuple[tuple[str, int], ...]:
    """Return (category, bytes) of the blocks live after an event on the first device, largest first."""
    blocks = trace.allocations
    rows = blocks.alive_at(event, 0)
    size = np.where(blocks.rounded >= 0, blocks.rounded, blocks.bytes)[rows]
    sums = np.bincount(blocks.category[rows], weights=size, minlength=len(Category)).astype(np.int64)
    parts = [(category.key, int(sums[category])) for category in Category if sums[category]]
    return tuple(sorted(parts, key=lambda part: -part[1]))


def _reserved_peak(trace: MemoryTrace) -> int:
    return int(trace.events.reserved[trace.events.device == 0].max(initial=0))


def _fits(
    trace: MemoryTrace, settings: AllocatorSettings, gpu: GpuSpec | None, reserved: int
) -> tuple[bool | None, int | None, list[str]]:
    if gpu is None or not trace.devices[0].has_reserved:
        return None, None, []
    notes = [_beside(gpu)]
    room = gpu.usable_bytes
    if reserved <= room:
        return True, room - reserved, notes
    tight = replay(trace, 0, settings, room, recorded=False)
    if tight.failure is not None:
        return False, room - reserved, notes
    notes.append(
        "It fits only because the allocator frees unused segments when memory runs out, which is slow."
    )
    return True, room - _peak(tight), notes


def _beside(gpu: GpuSpec) -> str:
    if gpu.context_bytes is None:
        return "Not counted: the CUDA context (docs/gpus.md) and other programs on the GPU."
    return (
        f"{gpu.context_bytes >> 20:,} MiB of the GPU's memory are set aside for the CUDA context: the "
        "least that was seen on this GPU (docs/gpus.md). Other programs, and what the program's own "
        "kernels add, are not counted."
    )


def _peak(tight: Replay) -> int:
    """The highest reserved bytes after any event."""
    return int(tight.reserved.max())


def _of_category(trace: MemoryTrace, category: Category) -> int:
    blocks = trace.allocations
    mine = (blocks.category == category) & (blocks.device == 0)
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


def _phases(trace: MemoryTrace, levels: Int64) -> tuple[tuple[str, int], ...]:
    """Return (name, highest allocated bytes) of the phases; what precedes the first forward is building."""
    events = trace.events
    allocates = (events.kind == Kind.ALLOC) & (events.device == 0)
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
