"""Advice: modules whose activations are worth recomputing in backward (activation checkpointing)."""

from __future__ import annotations

import numpy as np

from tb_memplugin.analysis.findings import Evidence, Finding, Fine, NotJudged, Result, Where, share
from tb_memplugin.analysis.folded_layers import folds
from tb_memplugin.analysis.highest_step import highest_step
from tb_memplugin.analysis.recompute import Activations, Recomputed
from tb_memplugin.analysis.units import FEWEST, Unit, part_text, size_text
from tb_memplugin.trace import Category, MemoryTrace, Phase
from tb_memplugin.trace.tables import ROOT, Int64

LEAST_SHARE = 0.1
"""Least share of the peak that checkpointing must save for a finding."""

NEARLY = 0.9
"""Modules that save this share of the best saving count as equally good; the one with the least forward
time is chosen."""

TRIED = 24
"""How many modules are examined: those that hold the most activations at the peak."""

SHOWN, SHOWN_SHARE = 8, 0.01
"""How many modules are shown, and the least share of the peak that each must save."""


def checkpointing(trace: MemoryTrace, device: int) -> Result:
    """Find the modules whose checkpointing lowers the highest step's peak most; repeated layers count as one.

    The finding's bytes are a lower bound of the saving, see `recompute.Recomputed`. What the checkpoint
    itself keeps besides inputs (random state, 5 KB per call on the CPU) is not counted.
    """
    blocks = trace.allocations
    if not (trace.calls.phase == Phase.FORWARD).any() or not (trace.calls.phase == Phase.BACKWARD).any():
        return NotJudged(
            "This rule needs the modules' forward and backward calls: pass the model to the recorder."
        )
    if not ((blocks.category == Category.ACTIVATION) & (blocks.device == device)).any():
        return NotJudged("The recording does not tell activations apart from other memory.")
    step = highest_step(trace, device)
    activations = Activations(trace, device, step)
    groups = _groups(trace, activations.own_bytes(step.peak_event))
    estimates = [(name, activations.recomputed(rows)) for name, rows in groups]
    most = max((estimate.saved_bytes for _, estimate in estimates), default=0)
    if most <= 0:
        return Fine(f"There is no module whose recomputation would lower the peak of step {step.number}.")
    if most < LEAST_SHARE * step.peak_bytes:
        return Fine(
            f"Recomputing one module would lower the peak of step {step.number} by at most {size_text(most)} "
            f"({share(most, step.peak_bytes)})."
        )
    good = [(name, estimate) for name, estimate in estimates if estimate.saved_bytes >= NEARLY * most]
    name, best = min(good, key=lambda item: (item[1].forward_ns, -item[1].saved_bytes, item[0]))
    least = max(SHOWN_SHARE * step.peak_bytes, 1)
    shown = [(name, estimate) for name, estimate in estimates if estimate.saved_bytes >= least]
    shown.sort(key=lambda item: (-item[1].saved_bytes, item[1].forward_ns))
    calls = f"{best.calls:,} calls" if best.calls > 1 else "one call"
    rates = Unit.for_bytes(FEWEST * _per_ms(estimate) for _, estimate in shown)  # the highest is 1 or more
    return Finding(
        kind="checkpointing",
        level="option",
        device=trace.devices[device].name,
        step=step.number,
        title=f"Recompute {name or ROOT} in backward instead of keeping its activations ({calls} per step).",
        subject=name or ROOT,
        bytes=best.saved_bytes,
        measure="less at the peak",
        of_bytes=step.peak_bytes,
        evidence=tuple(
            _evidence(name, estimate, step.number, rates, most) for name, estimate in shown[:SHOWN]
        ),
        where=_where(name, step.number),
        what_to_do="Call it through torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False).",
        price=f"one more forward of it: {_ms(best)} per step",
    )


def _groups(trace: MemoryTrace, own: Int64) -> list[tuple[str, Int64]]:
    """Return the modules (rows) under each folded name, largest first, submodules included."""
    inclusive = own.copy()
    for row in range(len(trace.modules) - 1, -1, -1):
        if trace.modules[row].parent >= 0:
            inclusive[trace.modules[row].parent] += inclusive[row]
    folded = folds([module.key for module in trace.modules])
    rows: dict[str, list[int]] = {}
    for row, module in enumerate(trace.modules):
        if module.is_module and inclusive[row]:
            rows.setdefault(folded[module.key], []).append(row)
    total = {name: int(inclusive[members].sum()) for name, members in rows.items()}
    largest = sorted(rows, key=lambda name: (-total[name], name))[:TRIED]
    return [(name, np.array(rows[name], np.int64)) for name in largest]


def _per_ms(estimate: Recomputed) -> float:
    """Return the bytes that each millisecond of recomputation saves."""
    return estimate.saved_bytes * 1e6 / max(estimate.forward_ns, 1)


def _evidence(name: str, estimate: Recomputed, step: int, rates: Unit, most: int) -> Evidence:
    calls = f"{estimate.calls:,} {'call' if estimate.calls == 1 else 'calls'}"
    size = part_text(estimate.held_bytes, most)
    per_ms = rates.text(_per_ms(estimate))
    detail = f"{_ms(estimate)} of forward in {calls}; saves {per_ms} per ms; holds {size}"
    return Evidence(name or ROOT, estimate.saved_bytes, detail, where=_where(name, step))


def _where(name: str, step: int) -> Where:
    search = (("find", name),) if name else ()
    return Where("modules", (("step", str(step)), *search, ("sort", "activations")))


def _ms(estimate: Recomputed) -> str:
    return f"{estimate.forward_ns / 1e6:,.2f} ms"
