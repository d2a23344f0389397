"""Advice from figures alone: memory that grows over the steps that MemoryMonitor watched."""

from __future__ import annotations

import numpy as np

from tb_memplugin.analysis.findings import Evidence, Finding, Fine, NotJudged, Result, Where
from tb_memplugin.analysis.growth import MATTERS_IN_STEPS, MATTERS_SHARE
from tb_memplugin.analysis.units import part_text, size_text
from tb_memplugin.trace.step_figures import StepFigures

PARTS = 10
"""Into how many parts of equally many steps a run is divided."""

FEWEST_STEPS = 5 * PARTS
"""Fewer steps are mostly warm-up."""

MOST_FLAT = 1
"""In how many gaps between parts the level may fall or stay; in the last gap it must rise."""


def monitored_growth(figures: StepFigures, device: str) -> Result:
    """Report memory at the end of the steps that rises from part to part of the run.

    The level of a part is the median of the bytes at the end of its steps. The finding's bytes are the rise
    per step between the middles of the second and the last part; the first is left out as warm-up.

    Args:
        figures: all steps of a worker.
        device: a device's name.
    """
    row = figures.device_row(device)
    if row is None or len(figures) < FEWEST_STEPS:
        return NotJudged(f"This rule needs {FEWEST_STEPS} watched steps; this run has {len(figures):,}.")
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
    return Finding(
        kind="growth",
        level="problem",
        device=device,
        step=last,
        title=f"Memory grows over {len(figures):,} watched steps.",
        subject="",
        bytes=a_step,
        measure="more with every step",
        of_bytes=peak,
        evidence=(
            Evidence(f"at the end of step {figures.steps[0]}", int(end[0]), "the first watched step", False),
            Evidence(
                f"at the end of step {last}",
                int(end[-1]),
                f"rises {part_text(a_step, int(end[-1]))} per step, in {rises.sum()} of {PARTS - 1} parts",
                False,
            ),
        ),
        where=Where("overview"),
        what_to_do=(
            "Find what still holds tensors after a step, such as a list of losses or outputs, and store "
            "loss.item() or tensor.detach() instead. To see where it is allocated, record 3 of these steps "
            "with memory_trace_handler."
        ),
        levels=tuple(int(value) for value in level),
    )
