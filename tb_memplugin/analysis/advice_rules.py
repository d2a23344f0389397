"""Advice: which memory could be saved. Every finding comes with its evidence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from tb_memplugin.analysis.checkpointing import checkpointing
from tb_memplugin.analysis.findings import (
    Advice,
    Evidence,
    Finding,
    Fine,
    Judgement,
    NotJudged,
    Result,
    Where,
)
from tb_memplugin.analysis.growth import WindowLevel, growth, growth_across
from tb_memplugin.analysis.kept_gradients import kept_gradients
from tb_memplugin.analysis.large_temporary import large_temporary
from tb_memplugin.analysis.optimizer_state import optimizer_state
from tb_memplugin.analysis.reference_cycles import reference_cycles
from tb_memplugin.analysis.unused_reserve import unused_reserve
from tb_memplugin.trace import MemoryTrace

__all__ = ["RULES", "Advice", "Evidence", "Finding", "Judgement", "Where", "advice"]


class Rule(NamedTuple):
    """A rule's name for people, what it looks for, and the function that judges a device of a trace."""

    name: str
    looks: str
    judge: Callable[[MemoryTrace, int], Result]


RULES = {
    "growth": Rule("growth", "memory that grows step after step and is never freed", growth),
    "kept_gradients": Rule(
        "kept gradients", "gradients that stay allocated while the next forward runs", kept_gradients
    ),
    "unused_reserve": Rule("unused reserve", "far more memory reserved than is ever in use", unused_reserve),
    "checkpointing": Rule("checkpointing", "activations worth recomputing in backward", checkpointing),
    "optimizer_state": Rule(
        "optimizer state", "optimizer state that makes up much of the peak, by dtype", optimizer_state
    ),
    "reference_cycles": Rule(
        "reference cycles", "memory that only a cycle of Python's objects holds", reference_cycles
    ),
    "large_temporary": Rule(
        "large temporaries", "temporaries of one operator that set the peak", large_temporary
    ),
}
"""Every rule by its kind; each has a file of its own. docs/advice.md lists their thresholds."""

Run = Callable[[], Sequence[WindowLevel]]


def advice(trace: MemoryTrace, device: str | None = None, run: Run | None = None) -> Advice:
    """Apply every rule to one device, or to all, and return the findings and each rule's judgement.

    Args:
        trace: any trace. A rule that needs more than the trace records is reported as "not judged".
        device: a device's name; None means every device.
        run: returns the levels of windows of the same run. It is called only where this trace has too few
            steps to judge growth.

    Raises:
        NotRecordedError: the trace has no such device.
    """
    rows = trace.device_rows(device)
    findings: list[Finding] = []
    judgements: list[Judgement] = []
    for row in rows:
        for kind, rule in RULES.items():
            result = _judged(trace, row, rule.judge)
            if kind == "growth" and run is not None and isinstance(result, NotJudged):
                result = growth_across(trace, row, run())
            judgements.append(_judgement(kind, trace.devices[row].name, result))
            if isinstance(result, Finding):
                findings.append(result)
    findings.sort(key=lambda finding: (finding.level != "problem", -finding.bytes))
    return Advice(tuple(findings), tuple(judgements))


def _judged(trace: MemoryTrace, device: int, rule: Callable[[MemoryTrace, int], Result]) -> Result:
    if not trace.live(device).max():
        return NotJudged("Nothing was ever alive on this device.")
    return rule(trace, device)


def _judgement(kind: str, device: str, result: Result) -> Judgement:
    if isinstance(result, Finding):
        return Judgement(kind, device, "found", result.title)
    return Judgement(kind, device, "fine" if isinstance(result, Fine) else "not judged", result.why)
