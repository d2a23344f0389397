"""Memory of an estimate by module, by phase and by operator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tb_memplugin.estimate.answer.estimation import allocated_levels
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.tables import Int64


@dataclass(frozen=True, slots=True)
class ModuleMemory:
    """Memory of one module, its submodules included, on the first device. All sizes are bytes.

    Attributes:
        name: its FQN, `(root)` for the model itself; or `outside:<operator>` for memory that no module owns.
        class_name: the class of the module.
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
    """Return rows of the first device's blocks, their bytes, and their bytes live at the peak (else 0)."""
    blocks = trace.allocations
    here = np.flatnonzero(blocks.device == 0)
    size = np.where(blocks.rounded >= 0, blocks.rounded, blocks.bytes)[here]
    peak = int(np.argmax(allocated_levels(trace, 0))) - 1
    alive = (blocks.born[here] <= peak) & (blocks.freed[here] > peak)
    return here, size, np.where(alive, size, 0)


def module_memory(trace: MemoryTrace) -> tuple[ModuleMemory, ...]:
    """Return the memory of every module, parents before children; a parent includes its children."""
    here, size, at_peak = _sizes(trace)
    owner, count = trace.allocations.module[here], len(trace.modules)
    live, asked, number = (
        np.bincount(owner, weights=weights, minlength=count).astype(np.int64)
        for weights in (at_peak, size, np.ones(len(here)))
    )
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
    operator, names = trace.allocations.operator[here], trace.operators
    sums, live, number = (
        np.bincount(operator, weights=weights, minlength=len(names)).astype(np.int64)
        for weights in (size, at_peak, np.ones(len(here)))
    )
    largest = np.zeros(len(names), np.int64)
    np.maximum.at(largest, operator, size)
    order = np.argsort(-sums, kind="stable")
    return tuple(
        TensorCreation(names[row], int(number[row]), int(sums[row]), int(largest[row]), int(live[row]))
        for row in order.tolist()
        if number[row]
    )
