"""Advice: temporaries of a single operator that raise the peak."""

from __future__ import annotations

import numpy as np

from tb_memplugin.analysis.block_origins import Judged
from tb_memplugin.analysis.divisions import codes
from tb_memplugin.analysis.findings import Evidence, Finding, Fine, NotJudged, Result
from tb_memplugin.analysis.folded_layers import folds
from tb_memplugin.analysis.source_lines import leading_frame, line_key
from tb_memplugin.analysis.steps import HighestStep
from tb_memplugin.analysis.sums import sums
from tb_memplugin.analysis.units import size_text
from tb_memplugin.trace import Category, MemoryTrace, Phase
from tb_memplugin.trace.tables import NO_OPERATOR, NOT_NAMED, OUTSIDE, Int64, module_text

LEAST_SHARE = 0.1
"""Least share of the peak that must be gone without the temporaries for a finding."""

TRIED = 3
"""How many sites are examined: those whose temporaries hold the most bytes at the peak."""

_OF_AN_OPERATOR = (
    "they exist only while this operator runs",
    "Process the input in pieces, such as computing the loss over parts of the batch, or use a fused or "
    "in-place variant of the operator.",
)

BY_PHASE = {
    Phase.FORWARD: _OF_AN_OPERATOR,
    Phase.BACKWARD: _OF_AN_OPERATOR,
    Phase.OPTIMIZER: (
        "they are freed before the optimizer step ends",
        "Give the optimizer fused=True, if it has that option.",
    ),
}
"""How long the temporaries of a phase live (docs/categories.md), and what to do."""

FOREACH = "aten::_foreach_"
"""The beginning of operators that work on all parameters at once."""

OR_ONE_AT_A_TIME = (
    " Otherwise foreach=False updates one parameter at a time, which helps if the largest is a small part "
    "of the model."
)

ELSEWHERE = (
    "they are freed soon after they are made",
    "Process the data in pieces, or free each result before the next one is made.",
)


def large_temporary(judged: Judged) -> Result:
    """Find a site whose temporaries (docs/categories.md) raise the peak.

    A site is an operator (where none is recorded, a source line) in a module; repeated layers count as
    one. The finding's bytes are by how much the peak of the highest step falls without these temporaries.
    """
    trace, device, step = judged.trace, judged.device, judged.step
    blocks = trace.allocations
    if not ((blocks.category == Category.TEMPORARY) & (blocks.device == device)).any():
        return NotJudged("The recording does not tell temporaries apart from other memory.")
    alive = blocks.alive_at(step.peak_event, device)
    alive = alive[blocks.category[alive] == Category.TEMPORARY]
    if not len(alive):
        return Fine(f"No temporary is alive at the peak of step {step.number}.")
    temporaries = np.flatnonzero(
        (blocks.category == Category.TEMPORARY)
        & (blocks.device == device)
        & (blocks.born < step.end)
        & (blocks.freed >= step.first)
    )
    site = _sites(trace, temporaries)
    at_peak = sums(site[np.searchsorted(temporaries, alive)], blocks.bytes[alive], int(site.max()) + 1)
    tried = np.flatnonzero(at_peak)
    tried = tried[np.argsort(-at_peak[tried], kind="stable")[:TRIED]]
    saved = {number: _saved(trace, step, temporaries[site == number]) for number in tried.tolist()}
    best = max(saved, key=lambda number: saved[number])
    if saved[best] < LEAST_SHARE * step.peak_bytes:
        size = int(blocks.bytes[alive].sum())
        return Fine(
            f"Temporaries hold {size_text(size)} at the peak of step {step.number}. Without those of any "
            f"single operator, the peak would be at most {size_text(saved[best])} lower."
        )
    return _finding(judged, temporaries[site == best], saved[best])


def _sites(trace: MemoryTrace, rows: Int64) -> Int64:
    """Return a number for each block that stands for its operator, else its line, and its folded module."""
    blocks = trace.allocations
    names: dict[str, int] = {}
    folded_name = folds([module.key for module in trace.modules])
    name_number = [names.setdefault(folded_name[module.key], len(names)) for module in trace.modules]
    module = np.array([*name_number, len(names)], np.int64)[blocks.module[rows]]
    line, lines = codes(trace, "line", rows)
    operator = np.where(blocks.operator[rows] >= 0, blocks.operator[rows] + len(lines), line)
    key = module * (len(trace.operators) + len(lines)) + operator
    site: Int64 = np.unique(key, return_inverse=True)[1].astype(np.int64)
    return site


def _saved(trace: MemoryTrace, step: HighestStep, rows: Int64) -> int:
    blocks = trace.allocations
    return step.saved(blocks.bytes[rows], blocks.born[rows] + 1, blocks.freed[rows])


def _finding(judged: Judged, rows: Int64, saved: int) -> Finding:
    trace, step = judged.trace, judged.step
    blocks = trace.allocations
    at_peak = rows[(blocks.born[rows] <= step.peak_event) & (blocks.freed[rows] > step.peak_event)]
    largest = int(at_peak[np.argmax(blocks.bytes[at_peak])])
    operator = blocks.operator[largest]
    frame = leading_frame(trace.stack(int(blocks.stack[largest])))
    line = "" if frame is None else line_key(frame)
    name = trace.operators[operator] if operator >= 0 else line or NO_OPERATOR
    key = trace.modules[blocks.module[largest]].key if blocks.module[largest] >= 0 else OUTSIDE
    folded_name = folds([module.key for module in trace.modules])
    inside = "" if key.startswith(OUTSIDE) or key == NOT_NAMED else f" in {module_text(folded_name[key])}"
    detail = f"{len(at_peak):,} alive at the peak, {len(rows):,} in the step"
    lifetime, what_to_do = BY_PHASE.get(Phase(int(blocks.phase[largest])), ELSEWHERE)
    if name.startswith(FOREACH):
        what_to_do += OR_ONE_AT_A_TIME
    maker = [Evidence(line, int(blocks.bytes[largest]), "made here")] if line and operator >= 0 else []
    return judged.finding(
        "large_temporary",
        "option",
        f"Temporaries of {name}{inside} set the peak: {lifetime}.",
        saved,
        (
            Evidence(f"{name}{inside}", int(blocks.bytes[at_peak].sum()), detail),
            *maker,
            Evidence(f"peak of step {step.number}", step.peak_bytes, "as recorded", False),
            judged.without("them", saved, ""),
        ),
        what_to_do,
        view="allocations",
        state=[("block", str(largest))],
        subject=name,
        price="a change to the code",
    )
