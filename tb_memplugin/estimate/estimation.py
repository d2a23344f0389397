"""The answer of an estimate: how much, does it fit, and what fills it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tb_memplugin.estimate.gpu_spec import GpuSpec
from tb_memplugin.estimate.simulator.allocator_settings import AllocatorSettings
from tb_memplugin.estimate.simulator.replay import Replay, replay
from tb_memplugin.estimate.simulator.simulated_trace import simulated_trace
from tb_memplugin.trace import Category, Kind, MemoryTrace, Phase
from tb_memplugin.trace.tables import Int64


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a run would take on the first device. All sizes are bytes.

    Attributes:
        peak_allocated_bytes, peak_reserved_bytes: what `torch.cuda.max_memory_allocated` and
            `max_memory_reserved` would say.
        workspace_bytes: what cuBLAS holds of that.
        fits: whether every request finds memory on the GPU; None without one.
        margin_bytes: what is left of the GPU beside the reserve, negative where it does not fit; or None.
        breakdown: (category, bytes) at the peak of allocated, largest first; they sum to it.
        phases: (name, highest allocated) of those that `track_phase` named, else of forward, backward, ...
        seconds: how long the fake run took.
        gpu: its name, "" for none.
        notes: what is modelled and what is not known, by name.
    """

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    workspace_bytes: int
    fits: bool | None
    margin_bytes: int | None
    breakdown: tuple[tuple[str, int], ...]
    phases: tuple[tuple[str, int], ...]
    seconds: float
    gpu: str
    notes: tuple[str, ...] = field(default=())


def allocated_levels(trace: MemoryTrace, device: int) -> Int64:
    """What the allocator set aside, in all: int64, shape (events + 1,); entry e + 1 holds after event e."""
    blocks, count = trace.allocations, len(trace.events)
    here = blocks.device == device
    size = np.where(blocks.rounded >= 0, blocks.rounded, blocks.bytes)[here]
    born, freed = blocks.born[here], blocks.freed[here]
    delta = np.zeros(count + 2, np.int64)
    np.add.at(delta, born + 1, size)
    np.subtract.at(delta, freed[freed < count] + 1, size[freed < count])
    return np.cumsum(delta[:-1])


def simulate(trace: MemoryTrace, settings: AllocatorSettings) -> MemoryTrace:
    """A fake run's trace with places, segments and the reserve of the caching allocator, on every device."""
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
) -> Estimate:
    """Read the answer from a fake run's trace, as it is and as simulated.

    `named` are (name, start, stop) of phases that the program named, epoch nanoseconds.
    """
    levels = allocated_levels(simulated, 0)
    reserved = _reserved_peak(simulated) if simulated.devices[0].has_reserved else int(levels.max())
    fits, margin, told = _fits(trace, settings, gpu, reserved)
    if not len(simulated.allocations):
        told.append(f"Nothing was allocated on {trace.devices[0].name}: build models and inputs there.")
    parts = breakdown(simulated, int(np.argmax(levels)) - 1)
    return Estimate(
        peak_allocated_bytes=int(levels.max()),
        peak_reserved_bytes=reserved,
        workspace_bytes=_of_category(simulated, Category.WORKSPACE),
        fits=fits,
        margin_bytes=margin,
        breakdown=parts,
        phases=_named(simulated, levels, named) or _phases(simulated, levels),
        seconds=seconds,
        gpu=gpu.name if gpu is not None else "",
        notes=(*notes, *told),
    )


def breakdown(trace: MemoryTrace, event: int) -> tuple[tuple[str, int], ...]:
    """(category, bytes) of what is alive after an event on the first device, largest first."""
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
        "It fits only because the allocator gives unused segments back when memory runs out: that is slow."
    )
    return True, room - _peak(tight), notes


def _beside(gpu: GpuSpec) -> str:
    if gpu.context_bytes is None:
        return "Not counted: the CUDA context (docs/gpus.md) and other programs on the GPU."
    return (
        f"Beside the allocator, {gpu.context_bytes >> 20:,} MiB are left for the CUDA context: the least "
        "that was seen on this GPU (docs/gpus.md). Other programs, and what the program's own kernels add, "
        "are not counted."
    )


def _peak(tight: Replay) -> int:
    """The most that is reserved when nothing is being made room for."""
    return int(tight.reserved.max())


def _of_category(trace: MemoryTrace, category: Category) -> int:
    blocks = trace.allocations
    mine = (blocks.category == category) & (blocks.device == 0)
    return int(blocks.bytes[mine].sum())


def _named(
    trace: MemoryTrace, levels: Int64, named: Sequence[tuple[str, int, int]]
) -> tuple[tuple[str, int], ...]:
    """The highest level in each, with what blocks got beyond their requests."""
    spans = np.array([span for _, *span in named], np.int64).reshape(-1, 2)
    times = trace.events.time_ns
    first, last = np.searchsorted(times, spans[:, 0]), np.searchsorted(times, spans[:, 1], "right")
    return tuple(
        (name, int(levels[begin : end + 1].max()))
        for (name, *_), begin, end in zip(named, first.tolist(), last.tolist(), strict=True)
    )


def _phases(trace: MemoryTrace, levels: Int64) -> tuple[tuple[str, int], ...]:
    found = []
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.OTHER):
        rows = np.flatnonzero(
            (trace.events.phase == phase) & (trace.events.kind == Kind.ALLOC) & (trace.events.device == 0)
        )
        if len(rows):
            found.append((phase.key, int(levels[rows + 1].max())))
    return tuple(found)
