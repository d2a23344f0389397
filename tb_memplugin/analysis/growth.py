"""Advice: memory that grows step after step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tb_memplugin.analysis.findings import Evidence, Finding, Fine, NotJudged, Result, Where
from tb_memplugin.analysis.folded_layers import folds
from tb_memplugin.analysis.leaks import FEWEST_STEPS, Leak, leaks, step_bounds
from tb_memplugin.analysis.source_lines import leading_frame, line_key
from tb_memplugin.analysis.units import counted, part_text, size_text
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.frames import FX
from tb_memplugin.trace.tables import NOT_NAMED, ROOT, Int64

MATTERS_IN_STEPS = 1_000
MATTERS_SHARE = 0.01
"""Growth is reported if 1,000 steps of it would add at least 1 % of the peak."""

SHOWN_SITES = 8

LONGEST_SEARCH = 400
"""The most characters that the Memory tab's search accepts."""


def growth(trace: MemoryTrace, device: int) -> Result:
    """Report sites whose blocks pile up (see `leaks`) as one finding, because they often have one cause.

    Its bytes are what a step allocates and keeps, the mean over all whole steps.
    """
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
    rows = [_evidence(site, last, event) for site in sites[:SHOWN_SITES]]
    rest = sites[SHOWN_SITES:]
    if rest:
        more = _Site(counted(len(rest), "more place"), tuple(leak for site in rest for leak in site.leaks))
        rows.append(Evidence(more.name, more.bytes, _rise(more), name=False))
    count = len(sites) - 1
    also = f" (also {counted(count, 'more place')})" if count else ""
    return Finding(
        kind="growth",
        level="problem",
        device=trace.devices[device].name,
        step=last,
        title=f"Memory grows step after step: {sites[0].name} keeps what it allocates{also}.",
        subject=sites[0].name,
        bytes=a_step,
        measure="more with every step",
        of_bytes=peak,
        evidence=tuple(rows),
        where=rows[0].where or Where("allocations"),
        what_to_do=(
            "Find what still holds these tensors after the step, such as a list of losses or outputs, and "
            "store loss.item() or tensor.detach() instead. A cache or queue that is still filling up looks "
            "the same at first, but stops growing later: to find out, record more than these "
            f"{growing[0].of_steps} steps."
        ),
        levels=tuple(trace.live(device)[bounds].tolist()),
    )


def _evidence(site: _Site, step: int, event: int) -> Evidence:
    blocks, steps = sum(leak.blocks for leak in site.leaks), max(leak.steps for leak in site.leaks)
    fate = "replaced by larger ones" if all(leak.is_replaced for leak in site.leaks) else "kept"
    detail = (
        f"{_rise(site)}; {counted(blocks, 'block')} {fate}, grew in {steps} of {site.leaks[0].of_steps} steps"
    )
    return Evidence(site.name, site.bytes, detail, where=_where(site, step, event))


def _rise(site: _Site) -> str:
    slope = sum(leak.slope_bytes for leak in site.leaks)
    return f"rises {part_text(slope, site.bytes)} per step"


def site_name(key: str, frames: Sequence[str], rows: Mapping[str, str]) -> str:
    """Return the line that stands for a stack; without a stack, the folded module name and the operator.

    Args:
        key: see `Leak.key`.
        frames: the stack, innermost frame first; empty if there is none.
        rows: the folded name of each module, from `folds`.
    """
    frame = leading_frame(frames)
    if frame is not None:
        return line_key(frame)
    module, dot, operator = key.partition(" · ")
    return f"{rows.get(module, module) or ROOT}{dot}{operator}"


def _where(site: _Site, step: int, event: int) -> Where:
    leak = site.leaks[0]
    frame = leading_frame(leak.frames)
    if frame is not None:
        search = frame.partition(FX)[0][:LONGEST_SEARCH]
        return Where("stacks", (("step", str(step)), ("event", str(event)), ("search", search)))
    module, _, operator = leak.key.partition(" · ")
    search = operator if module in ("", NOT_NAMED) or not site.name.startswith(module) else module
    return Where("allocations", (("step", str(step)), ("search", search), ("listed", "lifetime")))
