"""Advice: memory that grows from step to step: in a window, over windows of a run, or over watched steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from tb_memplugin.analysis.block_origins import Judged
from tb_memplugin.analysis.findings import Evidence, Finding, Fine, NotJudged, Result, Where
from tb_memplugin.analysis.folded_layers import folds
from tb_memplugin.analysis.leak_sites import (
    FEWEST_STEPS,
    MODELS_OWN,
    Leak,
    holder,
    kept_sites,
    leaks,
    step_bounds,
)
from tb_memplugin.analysis.source_lines import leading_frame, line_key
from tb_memplugin.analysis.units import counted, part_text, size_text
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.frames import FX
from tb_memplugin.trace.step_figures import StepFigures
from tb_memplugin.trace.tables import NOT_NAMED, Int64, module_text

MATTERS_IN_STEPS = 1_000
MATTERS_SHARE = 0.01
"""Growth is reported if 1,000 steps of it would add at least 1 % of the peak."""

SHOWN_SITES = 8

LONGEST_SEARCH = 400
"""The most characters that the Memory tab's search accepts."""


def growth(judged: Judged) -> Result:
    """Report sites whose blocks pile up (see `leaks`) as one finding, because they often have one cause.

    Its bytes are what a step allocates and keeps, the mean over all whole steps.
    """
    trace, device = judged.trace, judged.device
    bounds = step_bounds(trace, device)
    steps = len(bounds) - 1
    if steps < FEWEST_STEPS:
        has = f"has {len(trace.steps)}" if len(trace.steps) > 1 else "has no separate steps"
        if len(trace.steps) >= FEWEST_STEPS:
            has += f", {max(steps, 0)} of them with events of this device"
        return NotJudged(f"This rule needs {FEWEST_STEPS} whole steps in one recording; this one {has}.")
    growing = leaks(trace, device)
    if not growing:
        return Fine(
            f"No place grew in at least 3 of every 4 steps and kept that growth ({steps} steps recorded)."
        )
    peak = int(trace.live(device).max())
    a_step = sum(leak.bytes for leak in growing) // growing[0].of_steps
    if a_step * MATTERS_IN_STEPS < MATTERS_SHARE * peak:
        return Fine(
            f"Memory grows by {size_text(a_step)} per step: {MATTERS_IN_STEPS:,} steps would add less than "
            f"{MATTERS_SHARE:.0%} of the peak."
        )
    return _finding(trace, device, growing, bounds, a_step, peak)


@dataclass(frozen=True, slots=True)
class _Site:
    """All leaks with the same name: a source line, or a module and an operator."""

    name: str
    leaks: tuple[Leak, ...]

    @property
    def bytes(self) -> int:
        return sum(leak.bytes for leak in self.leaks)


def _sites(trace: MemoryTrace, growing: tuple[Leak, ...]) -> list[_Site]:
    rows = folds([module.key for module in trace.modules])
    by_name: dict[str, list[Leak]] = {}
    for leak in growing:
        by_name.setdefault(site_name(leak.key, leak.frames, rows), []).append(leak)
    sites = [_Site(name, tuple(leaks)) for name, leaks in by_name.items()]
    return sorted(sites, key=lambda site: (-site.bytes, site.name))


def _finding(
    trace: MemoryTrace, device: int, growing: tuple[Leak, ...], bounds: Int64, a_step: int, peak: int
) -> Finding:
    last, event = trace.step_at(int(bounds[-1]) - 1).number, int(bounds[-1]) - 1
    sites = _sites(trace, growing)
    rows = [_evidence(site, last, event, peak) for site in sites[:SHOWN_SITES]]
    rest = sites[SHOWN_SITES:]
    if rest:
        more = _Site(counted(len(rest), "more place"), tuple(leak for site in rest for leak in site.leaks))
        rows.append(Evidence(more.name, more.bytes, _rise(more, peak), name=False))
    kept_in = holder(trace, device, [leak.key for leak in sites[0].leaks])
    count = len(sites) - 1
    also = f" (also {counted(count, 'more place')})" if count else ""
    return Finding(
        kind="growth",
        level="problem",
        device=trace.devices[device].name,
        step=last,
        title=f"Memory grows step after step: {sites[0].name} keeps what it allocates"
        f"{f' in {kept_in}' if kept_in else ''}{also}.",
        subject=sites[0].name,
        bytes=a_step,
        measure="more with every step",
        of_bytes=peak,
        evidence=tuple(rows),
        where=rows[0].where or Where("allocations"),
        what_to_do=(
            f"Find what still holds these tensors after the step, {_STORE} A cache or queue that is still "
            "filling up looks the same at first, but stops growing later: to find out, record more than "
            f"these {growing[0].of_steps} steps."
        ),
        levels=tuple(trace.live(device)[bounds].tolist()),
    )


def _evidence(site: _Site, step: int, event: int, peak: int) -> Evidence:
    blocks, steps = sum(leak.blocks for leak in site.leaks), max(leak.steps for leak in site.leaks)
    fate = "replaced by larger ones" if all(leak.is_replaced for leak in site.leaks) else "kept"
    grew = f"grew in {steps} of {site.leaks[0].of_steps} steps"
    detail = f"{_rise(site, peak)}; {counted(blocks, 'block')} {fate}, {grew}"
    return Evidence(site.name, site.bytes, detail, where=_where(site, step, event))


def _rise(site: _Site, peak: int) -> str:
    slope = sum(leak.slope_bytes for leak in site.leaks)
    return f"rises {part_text(slope, peak)} per step"


def site_name(key: str, frames: Sequence[str], rows: Mapping[str, str]) -> str:
    """Return the line that stands for a stack; without a stack, the folded module name and the operator.

    Args:
        frames: the stack, innermost frame first; empty if there is none.
        rows: the folded name of each module, from `folds`.
    """
    frame = leading_frame(frames)
    if frame is not None:
        return line_key(frame)
    module, dot, operator = key.partition(" · ")
    return f"{module_text(rows.get(module, module))}{dot}{operator}"


def _where(site: _Site, step: int, event: int) -> Where:
    leak = site.leaks[0]
    frame = leading_frame(leak.frames)
    if frame is not None:
        search = frame.partition(FX)[0][:LONGEST_SEARCH]
        return Where("stacks", (("step", str(step)), ("event", str(event)), ("search", search)))
    module, _, operator = leak.key.partition(" · ")
    search = operator if module in ("", NOT_NAMED) or not site.name.startswith(module) else module
    return Where("allocations", (("step", str(step)), ("search", search), ("listed", "lifetime")))


FEWEST_WINDOWS = 4
"""Four windows have three gaps between them: as many as the steps that `growth` needs in one window."""

MOST_WINDOWS = 12
"""How many windows of a run are read at most, spread over the run; each is a file."""

SHOWN_SUSPECTS = 5

T = TypeVar("T")


def compares_windows(device: str, source: str) -> bool:
    """Return whether bytes of a device in one window can be compared with those in another.

    torch.profiler does not count all CPU memory that is alive when a window begins.
    """
    return device != "cpu" or source in ("MemoryTracer", "IterationReport", "LineTracer")


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
        if compares_windows(device.name, trace.source)
    )


def spread(windows: Sequence[T]) -> list[T]:
    """Choose at most `MOST_WINDOWS` windows, evenly spread, including the first and the last."""
    chosen = np.unique(np.linspace(0, len(windows) - 1, min(len(windows), MOST_WINDOWS)).round().astype(int))
    return [windows[row] for row in chosen.tolist()] if len(windows) else []


def rises_steadily(levels: Int64) -> bool:
    """Return whether levels (int64, shape (levels,)) rise in at least three of four gaps, and in the last."""
    rises = np.diff(levels)
    return bool(4 * np.count_nonzero(rises > 0) >= 3 * len(rises) and rises[-1] > 0)


def steady_rise(levels: Int64, steps: Int64, peak: int) -> int:
    """Return by how many bytes per step levels rise, 0 if they do not, or so little that it does not matter.

    The rise is the median one.

    Args:
        levels: bytes: int64, shape (steps,), two or more.
        steps: the number of the step that each is of, increasing; same shape.
    """
    if not rises_steadily(levels):
        return 0
    a_step = int(np.median(np.diff(levels) / np.diff(steps)))
    return a_step if a_step * MATTERS_IN_STEPS >= MATTERS_SHARE * peak else 0


def growth_across(trace: MemoryTrace, device: int, run: Sequence[WindowLevel]) -> Result:
    """Judge whether the memory that outlives windows grows from one window to the next.

    It does if it rises in at least three of four gaps between windows, and in the last one. The finding's
    bytes are the median rise per step. What one step holds for the next (a batch, a loss) does not outlive a
    window, and a cache that is full does not grow.

    Args:
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
    if not rises_steadily(levels):
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
    return _finding_across(name, windows, levels, a_step, peak)


def _too_few(device: str, count: int) -> str:
    if device == "cpu" and not count:
        return (
            "This rule needs 3 whole steps in one recording. Windows cannot be compared: on the CPU, "
            "torch.profiler does not report what was allocated before it started."
        )
    needed = f"This rule needs 3 whole steps in one recording, or {FEWEST_WINDOWS} windows of one worker"
    return f"{needed}; found: {count}."


def _finding_across(
    device: str, run: Sequence[WindowLevel], levels: np.ndarray, a_step: int, peak: int
) -> Finding:
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
            f"Find what still holds tensors after their step, {_STORE} The places listed here kept memory in "
            "every window, which is not a fault in itself: to be sure, record 3 steps in one window."
        ),
        levels=tuple(levels.tolist()),
    )


def _suspects(run: Sequence[WindowLevel]) -> list[Evidence]:
    """Return the sites that kept memory in every window, sorted by the least that they kept in one."""
    occurrences = Counter(name for window in run for name, _ in window.kept)
    in_all = [name for name, count in occurrences.items() if count == len(run)]
    least = {name: min(dict(window.kept)[name] for window in run) for name in in_all}
    largest = sorted(least.items(), key=lambda item: (-item[1], item[0]))[:SHOWN_SUSPECTS]
    return [Evidence(name, size, "kept for a step or more, in every window") for name, size in largest]


def _kept(trace: MemoryTrace, device: int) -> tuple[tuple[str, int], ...]:
    steps = len(trace.steps)
    before = trace.step_events(steps - 1)[0] if steps > 1 else len(trace.events)
    kept: Counter[str] = Counter()
    rows = folds([module.key for module in trace.modules])
    for key, frames, size in kept_sites(trace, device, before):
        kept[site_name(key, frames, rows)] += size // max(1, steps - 1)
    return tuple(kept.most_common())


PARTS = 10
"""Into how many parts of equally many steps a run is divided."""

FEWEST_WATCHED_STEPS = 3 * PARTS
"""With fewer, the level of a part is that of one or two steps, and most parts are warm-up."""

MOST_FLAT = 1
"""In how many gaps between parts the level may fall or stay; in the last gap it must rise."""


def monitored_growth(figures: StepFigures, device: str) -> Result:
    """Report memory at the end of the steps that rises from part to part of the run.

    The level of a part is the median of the bytes at the end of its steps. The finding's bytes are the rise
    per step between the middles of the second and the last part; the first is left out as warm-up. Where no
    bytes of the CPU were watched, those of the process count.
    """
    row = figures.device_row(device)
    if row is None and device == "cpu":
        row = figures.device_row("process")
    if row is None or len(figures) < FEWEST_WATCHED_STEPS:
        return NotJudged(
            f"This rule needs {FEWEST_WATCHED_STEPS} watched steps; this run has {len(figures):,}."
        )
    end, peak = figures.devices[row].end, int(figures.devices[row].peak.max())
    parts = np.array_split(np.arange(len(end)), PARTS)
    level = np.array([np.median(end[part]) for part in parts])
    middle = np.array([figures.steps[part].mean() for part in parts])
    rises = np.diff(level) > 0
    a_step = int((level[-1] - level[1]) / (middle[-1] - middle[1]))
    if not rises[-1] or int((~rises).sum()) > MOST_FLAT:
        return Fine(f"What is left at the end of a step did not rise throughout {len(figures):,} steps.")
    if a_step * MATTERS_IN_STEPS < MATTERS_SHARE * peak:
        return Fine(f"Memory grows by {size_text(a_step)} per step: too little to matter in 1,000 steps.")
    last = int(figures.steps[-1])
    heap = _free_heap(figures, row, parts[1])
    is_free = heap is not None and 2 * heap.rise > a_step
    watched = figures.devices[row].name
    whose = "The process grows" if watched == "process" else "Memory grows"
    why = ", because memory that it frees stays in the heap of the C library" if is_free else ""
    return Finding(
        kind="growth",
        level="problem",
        device=device,
        step=last,
        title=f"{whose} over {figures.step_count:,} watched steps{why}.",
        subject="",
        bytes=a_step,
        measure="more with every step",
        of_bytes=peak,
        evidence=(
            Evidence(f"at the end of step {figures.steps[0]}", int(end[0]), "the first watched step", False),
            Evidence(
                f"at the end of step {last}",
                int(end[-1]),
                f"rises {part_text(a_step, peak)} per step, in {rises.sum()} of {PARTS - 1} parts",
                False,
            ),
            *([] if heap is None else [heap.evidence]),
        ),
        where=Where("overview", (("device", watched), ("step", str(last)))),
        what_to_do=_GIVE_BACK if is_free else _FIND_HOLDER,
        levels=tuple(int(value) for value in level),
    )


_STORE = (
    "such as a list of losses or outputs, and store loss.item() instead. tensor.detach() frees the graph "
    "behind a tensor, but not the tensor."
)
_FIND_HOLDER = (
    f"Find what still holds tensors after a step, {_STORE} To see where it is allocated, record 3 of these "
    "steps with memory_trace_handler."
)
_GIVE_BACK = (
    "Start the program with MALLOC_TRIM_THRESHOLD_=131072 in its environment: glibc then takes each block of "
    "128 KiB or more from the system, and gives it back. What keeps the heap from shrinking is small and "
    "lives on from step to step, such as a list of losses: store loss.item() instead."
)


@dataclass(frozen=True, slots=True)
class _FreeHeap:
    """What the C library holds free: by how many bytes per step it rises, and the last reading."""

    rise: int
    evidence: Evidence


def _free_heap(figures: StepFigures, row: int, from_part: Int64) -> _FreeHeap | None:
    """Return how the free heap rises from a part of the steps on; None with fewer than two readings.

    Args:
        from_part: the rows of a part; int64, shape (steps of the part,).
    """
    heap_free = figures.devices[row].heap_free
    if heap_free is None:
        return None
    read = np.flatnonzero(heap_free >= 0)
    read = read[read >= from_part[0]]
    if len(read) < 2:
        return None
    first, last = int(read[0]), int(read[-1])
    size, steps = int(heap_free[last]), int(figures.steps[last] - figures.steps[first])
    rise = (size - int(heap_free[first])) // steps
    whole = int(figures.devices[row].peak.max())
    moved = f"rises {part_text(rise, whole)} per step" if rise > 0 else "does not rise"
    where = f"free in the heap of the C library at the end of step {figures.steps[last]}"
    return _FreeHeap(rise, Evidence(where, size, moved, False))
