"""Advice: memory that grows step after step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tb_memplugin.analysis.findings import Evidence, Finding, Fine, NotJudged, Result, Where, in_words
from tb_memplugin.analysis.folded_layers import folds
from tb_memplugin.analysis.leaks import FEWEST_STEPS, Leak, leaks, step_bounds
from tb_memplugin.analysis.source_lines import leading_frame, line_key
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.frames import FX
from tb_memplugin.trace.tables import NOT_NAMED, Int64

MATTERS_IN_STEPS = 1_000
MATTERS_SHARE = 0.01
"""Growth is worth a word where 1,000 steps of it would add 1 % of the peak."""

SHOWN_PLACES = 8

LONGEST_SEARCH = 400
"""Characters that the tab's search takes."""


def growth(trace: MemoryTrace, device: int) -> Result:
    """Places whose blocks pile up (see `leaks`), as one finding: they often belong to one cause.

    Its bytes are what is born in a step and kept, the mean over all whole steps.
    """
    bounds = step_bounds(trace, device)
    steps = len(bounds) - 1
    if steps < FEWEST_STEPS:
        has = f"has {len(trace.steps)}" if len(trace.steps) > 1 else "tells no steps apart"
        if len(trace.steps) >= FEWEST_STEPS:
            has += f", of which {max(steps, 0)} with events of this device"
        return NotJudged(f"It needs {FEWEST_STEPS} whole steps in one recording, and this one {has}.")
    found = leaks(trace, device)
    if not found:
        return Fine(f"No place grew in three of four of the {steps} steps and kept what it had grown by.")
    peak = int(trace.live(device).max())
    a_step = sum(leak.bytes for leak in found) // steps
    if a_step * MATTERS_IN_STEPS < MATTERS_SHARE * peak:
        return Fine(
            f"It grows by {in_words(a_step)} a step: {MATTERS_IN_STEPS:,} steps add less than "
            f"{MATTERS_SHARE:.0%} of the peak."
        )
    return _finding(trace, device, found, bounds, a_step, peak)


@dataclass(frozen=True, slots=True)
class _Place:
    """All leaks that go by one name: a source line, or a module and an operator."""

    name: str
    leaks: tuple[Leak, ...]

    @property
    def bytes(self) -> int:
        return sum(leak.bytes for leak in self.leaks)


def _places(trace: MemoryTrace, found: tuple[Leak, ...]) -> list[_Place]:
    rows = folds([module.key for module in trace.modules])
    by_name: dict[str, list[Leak]] = {}
    for leak in found:
        by_name.setdefault(place_name(leak.key, leak.frames, rows), []).append(leak)
    places = [_Place(name, tuple(leaks)) for name, leaks in by_name.items()]
    return sorted(places, key=lambda place: (-place.bytes, place.name))


def _finding(
    trace: MemoryTrace, device: int, found: tuple[Leak, ...], bounds: Int64, a_step: int, peak: int
) -> Finding:
    last, event = trace.step_at(int(bounds[-1]) - 1).number, int(bounds[-1]) - 1
    places = _places(trace, found)
    rows = [_evidence(place, last, event) for place in places[:SHOWN_PLACES]]
    rest = places[SHOWN_PLACES:]
    if rest:
        more = _Place(f"{len(rest):,} more {_plural('place', len(rest))}", _all(rest))
        rows.append(Evidence(more.name, more.bytes, _rise(more), name=False))
    others = f", and {len(places) - 1:,} more {_plural('place', len(places) - 1)} too" if places[1:] else ""
    return Finding(
        kind="growth",
        level="problem",
        device=trace.devices[device].name,
        step=last,
        title=f"Memory grows step after step: {places[0].name} keeps what it allocates{others}.",
        subject=places[0].name,
        bytes=a_step,
        measure="more with every step",
        of_bytes=peak,
        evidence=tuple(rows),
        where=rows[0].where or Where("allocations"),
        what_to_do="Find what still refers to these tensors after the step, such as a list of losses or "
        "outputs, and keep loss.item() or tensor.detach() instead. A cache or queue that still fills looks "
        f"the same but ends: record more than these {len(bounds) - 1} steps to tell.",
        levels=tuple(trace.live(device)[bounds].tolist()),
    )


def _all(places: list[_Place]) -> tuple[Leak, ...]:
    return tuple(leak for place in places for leak in place.leaks)


def _evidence(place: _Place, step: int, event: int) -> Evidence:
    blocks, steps = sum(leak.blocks for leak in place.leaks), max(leak.steps for leak in place.leaks)
    kept = "replaced by larger ones" if all(leak.is_replaced for leak in place.leaks) else "kept"
    detail = (
        f"{_rise(place)}; {blocks:,} {_plural('block', blocks)} {kept}, "
        f"grew in {steps} of {place.leaks[0].of_steps} steps"
    )
    return Evidence(place.name, place.bytes, detail, where=_where(place, step, event))


def _rise(place: _Place) -> str:
    return f"rises {in_words(sum(leak.slope_bytes for leak in place.leaks))} a step"


def place_name(key: str, frames: Sequence[str], rows: Mapping[str, str]) -> str:
    """The line that a stack goes by; else the module's row in `folds` and the operator (see `Leak.key`)."""
    frame = leading_frame(frames)
    if frame is not None:
        return line_key(frame)
    module, dot, operator = key.partition(" · ")
    return f"{rows.get(module, module) or '(root)'}{dot}{operator}"


def _where(place: _Place, step: int, event: int) -> Where:
    leak = place.leaks[0]
    frame = leading_frame(leak.frames)
    if frame is not None:
        search = frame.partition(FX)[0][:LONGEST_SEARCH]
        return Where("stacks", (("step", str(step)), ("event", str(event)), ("search", search)))
    module, _, operator = leak.key.partition(" · ")
    search = operator if module in ("", NOT_NAMED) or not place.name.startswith(module) else module
    return Where("allocations", (("step", str(step)), ("search", search), ("listed", "lifetime")))


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"
