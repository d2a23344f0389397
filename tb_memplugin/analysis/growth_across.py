"""Advice: memory that grows from one recorded window of a run to the next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from tb_memplugin.analysis.findings import Evidence, Finding, Fine, NotJudged, Result, Where
from tb_memplugin.analysis.folded_layers import folds
from tb_memplugin.analysis.growth import MATTERS_IN_STEPS, MATTERS_SHARE, site_name
from tb_memplugin.analysis.leaks import MODELS_OWN, kept_sites
from tb_memplugin.analysis.units import size_text
from tb_memplugin.trace import MemoryTrace

FEWEST_WINDOWS = 4
"""Four windows have three gaps between them: as many as the steps that `growth` needs in one window."""

MOST_WINDOWS = 12
"""How many windows of a run are read at most, spread over the run; each is a file."""

SHOWN_SITES = 5

COUNTED_ON_CPU = ("MemoryTracer", "IterationReport", "LineTracer")
"""Sources that count all CPU memory alive when a window begins. torch.profiler does not on the CPU."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WindowLevel:
    """What one window of a run records of a device. Categories in `MODELS_OWN` are left out.

    Attributes:
        step: the number of its first step.
        device: the device's name.
        through_bytes: bytes alive before its first event and still after its last. (Optimizer state is left
            out because it is allocated as parts of the model are first used.)
        kept: (place, bytes per step) of blocks that were allocated in it and not freed. If the window has
            several steps, blocks of the last one do not count.
    """

    step: int
    device: str
    through_bytes: int
    kept: tuple[tuple[str, int], ...]


def window_levels(trace: MemoryTrace) -> tuple[WindowLevel, ...]:
    """Return the level of a window on each device whose memory its source counts completely."""
    blocks, last = trace.allocations, len(trace.events)
    through = (blocks.born < 0) & (blocks.freed >= last) & ~np.isin(blocks.category, MODELS_OWN)
    return tuple(
        WindowLevel(
            step=trace.steps[0].number,
            device=device.name,
            through_bytes=int(blocks.bytes[through & (blocks.device == row)].sum()),
            kept=_kept(trace, row),
        )
        for row, device in enumerate(trace.devices)
        if device.name != "cpu" or trace.source in COUNTED_ON_CPU
    )


def spread(windows: Sequence[T]) -> list[T]:
    """Choose at most `MOST_WINDOWS` windows, evenly spread, including the first and the last."""
    chosen = np.unique(np.linspace(0, len(windows) - 1, min(len(windows), MOST_WINDOWS)).round().astype(int))
    return [windows[row] for row in chosen.tolist()] if len(windows) else []


def growth_across(trace: MemoryTrace, device: int, run: Sequence[WindowLevel]) -> Result:
    """Judge whether the memory that outlives windows grows from one window to the next.

    It does if it rises in at least three of four gaps between windows, and in the last one. The finding's
    bytes are the median rise per step. What one step holds for the next (a batch, a loss) does not outlive a
    window, and a cache that is full does not grow.

    Args:
        trace: one window of the run, whose peak is the measure.
        device: row in `trace.devices`.
        run: windows of one worker, in any order.
    """
    name = trace.devices[device].name
    of_step = {window.step: window for window in run if window.device == name}
    windows = [of_step[step] for step in sorted(of_step)]
    if len(windows) < FEWEST_WINDOWS:
        return NotJudged(_too_few(name, len(windows)))
    levels = np.array([window.through_bytes for window in windows], np.int64)
    rises, steps = np.diff(levels), np.diff(sorted(of_step))
    grew = int(np.count_nonzero(rises > 0))
    if 4 * grew < 3 * len(rises) or rises[-1] <= 0:
        last = "" if rises[-1] > 0 or not grew else ", but not in the last"
        return Fine(
            f"The memory that outlives a window grew in {grew} of {len(rises)} gaps between windows{last}."
        )
    a_step, peak = int(np.median(rises / steps)), int(trace.live(device).max())
    if a_step * MATTERS_IN_STEPS < MATTERS_SHARE * peak:
        return Fine(
            f"From window to window, memory grows by {size_text(a_step)} per step: {MATTERS_IN_STEPS:,} "
            f"steps would add less than {MATTERS_SHARE:.0%} of the peak."
        )
    return _finding(name, windows, levels, a_step, peak)


def _too_few(device: str, count: int) -> str:
    if device == "cpu" and not count:
        return (
            "This rule needs 3 whole steps in one recording. Windows cannot be compared: on the CPU, "
            "torch.profiler does not report what was allocated before it started."
        )
    needed = f"This rule needs 3 whole steps in one recording, or {FEWEST_WINDOWS} windows of one worker"
    return f"{needed}; found: {count}."


def _finding(device: str, run: Sequence[WindowLevel], levels: np.ndarray, a_step: int, peak: int) -> Finding:
    first, last, grew = run[0], run[-1], np.count_nonzero(np.diff(levels) > 0)
    return Finding(
        kind="growth",
        level="problem",
        device=device,
        step=last.step,
        title="Memory grows from one recorded window to the next.",
        subject="",
        bytes=a_step,
        measure="more with every step",
        of_bytes=peak,
        evidence=(
            Evidence(
                f"outlives the window at step {last.step}",
                last.through_bytes,
                "the last window; the model's own memory is not included",
                False,
            ),
            Evidence(
                f"outlived the window at step {first.step}",
                first.through_bytes,
                f"the first of {len(run)} windows; grew in {grew} of {len(run) - 1} gaps",
                False,
            ),
            *_suspects(run),
        ),
        where=Where("allocations", (("step", str(last.step)), ("listed", "lifetime"))),
        what_to_do=(
            "Find what still holds tensors after their step, such as a list of losses or outputs, and store "
            "loss.item() or tensor.detach() instead. The places listed here kept memory in every window, "
            "which is not a fault in itself: to be sure, record 3 steps in one window."
        ),
        levels=tuple(levels.tolist()),
    )


def _suspects(run: Sequence[WindowLevel]) -> list[Evidence]:
    """Return the sites that kept memory in every window, sorted by the least that they kept in one."""
    occurrences = Counter(name for window in run for name, _ in window.kept)
    in_all = [name for name, count in occurrences.items() if count == len(run)]
    least = {name: min(dict(window.kept)[name] for window in run) for name in in_all}
    largest = sorted(least.items(), key=lambda item: (-item[1], item[0]))[:SHOWN_SITES]
    return [Evidence(name, size, "kept for a step or more, in every window") for name, size in largest]


def _kept(trace: MemoryTrace, device: int) -> tuple[tuple[str, int], ...]:
    steps = len(trace.steps)
    before = trace.step_events(steps - 1)[0] if steps > 1 else len(trace.events)
    kept: Counter[str] = Counter()
    rows = folds([module.key for module in trace.modules])
    for key, frames, size in kept_sites(trace, device, before):
        kept[site_name(key, frames, rows)] += size // max(1, steps - 1)
    return tuple(kept.most_common())
