"""Advice: memory that grows from one recorded window of a run to the next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from tb_memplugin.analysis.findings import Evidence, Finding, Fine, NotJudged, Result, Where, in_words
from tb_memplugin.analysis.folded_layers import folds
from tb_memplugin.analysis.growth import MATTERS_IN_STEPS, MATTERS_SHARE, place_name
from tb_memplugin.analysis.leaks import MODELS_OWN, kept_places
from tb_memplugin.trace import MemoryTrace

FEWEST_WINDOWS = 4
"""So that there are three gaps between them: as many as the steps that growth within a window needs."""

MOST_WINDOWS = 12
"""Windows of a run that are read, spread over it: each is a file."""

SHOWN_PLACES = 5

COUNTED_ON_CPU = ("MemoryTracer", "IterationReport", "LineTracer")
"""Sources that look for all that is alive when a window begins. On the CPU torch.profiler cannot."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class WindowLevel:
    """What one window of a run tells of a device.

    Attributes:
        step: the number of its first step.
        device: the device's name.
        through_bytes: alive from its first event to its last, and before, without the model's own: state of
            an optimizer comes as parts of the model are first used.
        kept: places of which blocks were born in it and stayed, by bytes a step, without the model's own;
            where it has several steps, blocks of the last do not count.
    """

    step: int
    device: str
    through_bytes: int
    kept: tuple[tuple[str, int], ...]


def window_levels(trace: MemoryTrace) -> tuple[WindowLevel, ...]:
    """What a window tells of each device that its source counts all memory of."""
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
    """At most `MOST_WINDOWS` of them, the first and the last too."""
    chosen = np.unique(np.linspace(0, len(windows) - 1, min(len(windows), MOST_WINDOWS)).round().astype(int))
    return [windows[row] for row in chosen.tolist()] if len(windows) else []


def growth_across(trace: MemoryTrace, device: int, run: Sequence[WindowLevel]) -> Result:
    """Whether what outlives windows grows from one to the next, in three of four gaps and in the last.

    Its bytes are the median rise a step, from one window to the next. What a step holds for the next one
    (a batch, a loss) does not outlive a window; a cache that is full does not grow.

    Args:
        trace: one window of the run, for the peak.
        device: row in `trace.devices`.
        run: windows of one worker, in any order.
    """
    name = trace.devices[device].name
    mine = sorted({one.step: one for one in run if one.device == name}.values(), key=lambda one: one.step)
    if len(mine) < FEWEST_WINDOWS:
        return NotJudged(_too_few(name, len(mine)))
    levels = np.array([one.through_bytes for one in mine], np.int64)
    rises, steps = np.diff(levels), np.diff([one.step for one in mine])
    grew = int(np.count_nonzero(rises > 0))
    if 4 * grew < 3 * len(rises) or rises[-1] <= 0:
        last = "" if rises[-1] > 0 or not grew else ", not in the last"
        return Fine(f"What outlives a window grew in {grew} of {len(rises)} gaps between windows{last}.")
    a_step, peak = int(np.median(rises / steps)), int(trace.live(device).max())
    if a_step * MATTERS_IN_STEPS < MATTERS_SHARE * peak:
        return Fine(
            f"From window to window it grows by {in_words(a_step)} a step: {MATTERS_IN_STEPS:,} steps add "
            f"less than {MATTERS_SHARE:.0%} of the peak."
        )
    return _finding(name, mine, levels, a_step, peak)


def _too_few(device: str, count: int) -> str:
    if device == "cpu" and not count:
        return (
            "It needs 3 whole steps in one recording: on the CPU torch.profiler does not tell what was alive "
            "before, so windows cannot be compared."
        )
    needed = f"It needs 3 whole steps in one recording, or {FEWEST_WINDOWS} windows of one worker"
    return f"{needed}: here are {count}."


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
                "the last one; without the model's own",
                False,
            ),
            Evidence(
                f"outlived the window at step {first.step}",
                first.through_bytes,
                f"the first of {len(run)}; grew in {grew} of {len(run) - 1} gaps",
                False,
            ),
            *_suspects(run),
        ),
        where=Where("allocations", (("step", str(last.step)), ("listed", "lifetime"))),
        what_to_do="Find what still refers to tensors after their step, such as a list of losses or outputs, "
        "and keep loss.item() or tensor.detach() instead. Places named here stayed in every window, which "
        "alone is no fault: record 3 steps in one window to tell.",
        levels=tuple(levels.tolist()),
    )


def _suspects(run: Sequence[WindowLevel]) -> list[Evidence]:
    """Places of which something stayed in every window, by the least that did."""
    seen = Counter(name for one in run for name, _ in one.kept)
    least = {
        name: min(dict(one.kept)[name] for one in run) for name, count in seen.items() if count == len(run)
    }
    largest = sorted(least.items(), key=lambda item: (-item[1], item[0]))[:SHOWN_PLACES]
    return [Evidence(name, size, "a step or more, stayed in every window") for name, size in largest]


def _kept(trace: MemoryTrace, device: int) -> tuple[tuple[str, int], ...]:
    steps = len(trace.steps)
    before = trace.step_events(steps - 1)[0] if steps > 1 else len(trace.events)
    found: Counter[str] = Counter()
    rows = folds([module.key for module in trace.modules])
    for key, frames, size in kept_places(trace, device, before):
        found[place_name(key, frames, rows)] += size // max(1, steps - 1)
    return tuple(found.most_common())
