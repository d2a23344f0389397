"""Advice: which memory could be saved. Every finding comes with its evidence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tb_memplugin.analysis.advice_rules.attention_scores import attention_scores
from tb_memplugin.analysis.advice_rules.avoidable_tensors import (
    dense_embedding_gradient,
    old_copies,
    one_hot_vectors,
    repeated_values,
    wide_tensors,
)
from tb_memplugin.analysis.advice_rules.checkpointing import checkpointing
from tb_memplugin.analysis.advice_rules.failed_request import failed_request
from tb_memplugin.analysis.advice_rules.fragmented_reserve import fragmented_reserve
from tb_memplugin.analysis.advice_rules.kept_gradients import kept_gradients
from tb_memplugin.analysis.advice_rules.large_temporary import large_temporary
from tb_memplugin.analysis.advice_rules.loss_logits import loss_logits
from tb_memplugin.analysis.advice_rules.optimizer_state import optimizer_state
from tb_memplugin.analysis.advice_rules.outsized_tensor import outsized_tensor
from tb_memplugin.analysis.advice_rules.parameter_copies import parameter_copies
from tb_memplugin.analysis.advice_rules.previous_result import previous_result
from tb_memplugin.analysis.advice_rules.reference_cycles import reference_cycles
from tb_memplugin.analysis.advice_rules.summed_losses import summed_losses
from tb_memplugin.analysis.advice_rules.uneven_devices import uneven_devices
from tb_memplugin.analysis.advice_rules.unused_gradients import unused_gradients
from tb_memplugin.analysis.advice_rules.unused_graph import unused_graph
from tb_memplugin.analysis.advice_rules.unused_reserve import unused_reserve
from tb_memplugin.analysis.block_origins import Judged
from tb_memplugin.analysis.findings import Finding, Fine, Judgement, NotJudged, Result
from tb_memplugin.analysis.growth import WindowLevel, growth, growth_across, monitored_growth
from tb_memplugin.analysis.peak_holders import PeakHolders, peak_holders
from tb_memplugin.analysis.units import counted
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.result import AnalysisResult, ResultTable
from tb_memplugin.trace.step_figures import StepFigures


@dataclass(frozen=True, slots=True)
class Advice(AnalysisResult):
    """The answer of all rules.

    Attributes:
        findings: those of `URGENT` first, in this order, then by bytes.
        judgements: one per rule and device.
        peaks: who fills the peak of each device that was ever in use, the highest peak first.
    """

    findings: ResultTable[Finding]
    judgements: ResultTable[Judgement]
    peaks: ResultTable[PeakHolders] = field(default_factory=ResultTable)


class Rule(NamedTuple):
    """A rule's name for people, what it looks for, and the function that judges a device."""

    name: str
    looks: str
    judge: Callable[[Judged], Result]


RULES = {
    "failed_request": Rule(
        "failed request", "what would have made a request fit that failed", failed_request
    ),
    "growth": Rule("growth", "memory that grows step after step and is never freed", growth),
    "kept_gradients": Rule(
        "kept gradients", "gradients that stay allocated while the next forward runs", kept_gradients
    ),
    "unused_gradients": Rule(
        "unused gradients", "gradients of parameters that no optimizer changes", unused_gradients
    ),
    "summed_losses": Rule(
        "summed losses",
        "several forwards that wait for one backward over the sum of their losses",
        summed_losses,
    ),
    "uneven_devices": Rule(
        "uneven devices", "one device that holds far more than others that run the same code", uneven_devices
    ),
    "unused_graph": Rule("unused graph", "activations kept for a backward that never runs", unused_graph),
    "previous_result": Rule(
        "previous result", "what a forward returned, alive while the next one runs", previous_result
    ),
    "unused_reserve": Rule("unused reserve", "far more memory reserved than is ever in use", unused_reserve),
    "fragmentation": Rule("fragmentation", "free memory that requests cannot use", fragmented_reserve),
    "attention_scores": Rule(
        "attention scores", "scores of attention that a fused kernel would not store", attention_scores
    ),
    "loss_logits": Rule(
        "logits in the loss", "copies of the logits of all tokens, often in float32", loss_logits
    ),
    "repeated_values": Rule(
        "repeated values", "tensors that repeat the values of a smaller one, such as masks", repeated_values
    ),
    "one_hot_vectors": Rule("one-hot vectors", "one-hot vectors in the place of indices", one_hot_vectors),
    "old_copies": Rule(
        "old copies",
        "tensors that are copied in a loop, as by torch.cat, and kept until all new copies are there",
        old_copies,
    ),
    "dense_embedding_gradient": Rule(
        "dense embedding gradient",
        "gradients of embedding rows that were not looked up",
        dense_embedding_gradient,
    ),
    "wide_tensors": Rule(
        "wide tensors", "tensors in float64, in a dtype wider than before, or masks of numbers", wide_tensors
    ),
    "parameter_copies": Rule(
        "parameter copies", "parameters in memory twice: master copies, EMA, a second model", parameter_copies
    ),
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
    "outsized_tensor": Rule(
        "outsized tensor", "a tensor that is many times as large as every other", outsized_tensor
    ),
}
"""Every rule by its kind. docs/advice.md lists their thresholds."""

URGENT = ("failed_request", "growth")
"""The rules whose findings end a training, whatever their bytes."""

GENERAL = ("checkpointing", "optimizer_state")
"""The rules whose findings apply to most trainings. Findings that are particular to this one come first."""

LARGE_SHARE = 0.1
"""The share of the peak from which they do."""

Run = Callable[[], Sequence[WindowLevel]]


def advice(
    trace: MemoryTrace, device: str | None = None, run: Run | None = None, watched: StepFigures | None = None
) -> Advice:
    """Apply every rule to one device, or to all: findings, judgements, and who fills each peak.

    Args:
        trace: any trace. A rule that needs more than the trace records is reported as "not judged".
        device: a device's name; None means every device.
        run: returns the levels of windows of the same run. It is called only where this trace has too few
            steps to judge growth.
        watched: all steps of the same run that MemoryMonitor watched. They count if windows show no growth.

    Raises:
        NotRecordedError: the trace has no such device.
    """
    rows = trace.device_rows(device)
    findings: list[Finding] = []
    judgements: list[Judgement] = []
    first = Judged(trace, 0)
    for judged in map(first.beside, rows):
        for kind, rule in RULES.items():
            result = _result(judged, rule.judge)
            if kind == "growth":
                result = _over_the_run(judged, result, run, watched)
            judgements.append(_judgement(kind, judged.name, result))
            if isinstance(result, Finding):
                findings.append(result)
    findings.sort(key=_order)
    peaks = [peak_holders(trace, row) for row in rows if trace.live(row).max()]
    peaks.sort(key=lambda peak: -peak.bytes)
    return Advice(ResultTable(findings), ResultTable(judgements), ResultTable(peaks))


def _over_the_run(judged: Judged, growth: Result, run: Run | None, watched: StepFigures | None) -> Result:
    """Judge growth over windows where one does not tell, and over watched steps where windows have none."""
    if run is not None and isinstance(growth, NotJudged):
        growth = growth_across(judged.trace, judged.device, run())
    if watched is None or isinstance(growth, Finding):
        return growth
    whole = monitored_growth(watched, judged.name)
    return growth if isinstance(growth, Fine) and not isinstance(whole, Finding) else whole


def _order(finding: Finding) -> tuple[int, ...]:
    urgency = URGENT.index(finding.kind) if finding.kind in URGENT else len(URGENT)
    is_large = finding.bytes >= LARGE_SHARE * finding.of_bytes and finding.kind not in GENERAL
    return urgency, not is_large, -finding.bytes


def advice_on_steps(figures: StepFigures) -> Advice:
    """Judge growth on every device of a run of which only the figures of its steps were recorded.

    The other rules are not judged: figures contain no allocations.
    """
    results = {device.name: monitored_growth(figures, device.name) for device in figures.devices}
    no_rule = NotJudged("MemoryMonitor records figures of steps, not allocations.")
    return Advice(
        findings=ResultTable(result for result in results.values() if isinstance(result, Finding)),
        judgements=ResultTable(
            _judgement(kind, name, result if kind == "growth" else no_rule)
            for name, result in results.items()
            for kind in RULES
        ),
    )


def _result(judged: Judged, rule: Callable[[Judged], Result]) -> Result:
    if not judged.trace.live(judged.device).max():
        return NotJudged("Nothing was ever alive on this device.")
    return judged.result(rule)


def _judgement(kind: str, device: str, result: Result) -> Judgement:
    if isinstance(result, Finding):
        return Judgement(kind, device, "found", result.title)
    return Judgement(kind, device, "fine" if isinstance(result, Fine) else "not judged", result.why)


def heading(advice: Advice) -> str:
    """Return how many findings there are and how many rules could not be judged, in one line."""
    if not advice.judgements:
        return "Nothing was recorded: no rule was judged."
    if not advice.findings and all(judgement.verdict == "fine" for judgement in advice.judgements):
        return f"Nothing to fix: {counted(len(advice.judgements), 'rule')} found nothing."
    problems = sum(finding.level == "problem" for finding in advice.findings)
    options = len(advice.findings) - problems
    unjudged = sum(judgement.verdict == "not judged" for judgement in advice.judgements)
    counts = (
        f"{_count(problems, 'problem')}, {_count(options, 'option')}"
        if advice.findings
        else "No problem found"
    )
    return f"{counts}; {_count(unjudged, 'rule')} could not be judged"


def _count(count: int, word: str) -> str:
    return f"{count or 'no'} {word if count == 1 else word + 's'}"
