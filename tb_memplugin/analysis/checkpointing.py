"""Advice: modules whose activations are worth recomputing in backward (activation checkpointing)."""

from __future__ import annotations

import numpy as np

from tb_memplugin.analysis.findings import Evidence, Finding, Fine, NotJudged, Result, Where, in_words, share
from tb_memplugin.analysis.folded_layers import folds
from tb_memplugin.analysis.highest_step import highest_step
from tb_memplugin.analysis.recompute import Activations, Recomputed
from tb_memplugin.trace import Category, MemoryTrace, Phase
from tb_memplugin.trace.tables import Int64

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
    found = [(name, activations.recomputed(rows)) for name, rows in groups]
    found = [(name, one) for name, one in found if one.saved_bytes > 0]
    if not found:
        return Fine(f"There is no module whose recomputation would lower the peak of step {step.number}.")
    most = max(one.saved_bytes for _, one in found)
    if most < LEAST_SHARE * step.peak_bytes:
        return Fine(
            f"Recomputing one module would lower the peak of step {step.number} by at most {in_words(most)} "
            f"({share(most, step.peak_bytes)})."
        )
    good = [(name, one) for name, one in found if one.saved_bytes >= NEARLY * most]
    name, best = min(good, key=lambda item: (item[1].forward_ns, -item[1].saved_bytes, item[0]))
    found = [(name, one) for name, one in found if one.saved_bytes >= SHOWN_SHARE * step.peak_bytes]
    found.sort(key=lambda item: (-item[1].saved_bytes, item[1].forward_ns))
    calls = f"{best.calls:,} calls" if best.calls > 1 else "one call"
    return Finding(
        kind="checkpointing",
        level="option",
        device=trace.devices[device].name,
        step=step.number,
        title=f"Recompute {_shown(name)} in backward instead of keeping its activations ({calls} per step).",
        subject=_shown(name),
        bytes=best.saved_bytes,
        measure="less at the peak",
        of_bytes=step.peak_bytes,
        evidence=tuple(_evidence(name, one, step.number) for name, one in found[:SHOWN]),
        where=_where(name, step.number),
        what_to_do="Call it through torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False).",
        price=f"one more forward of it: {_ms(best)} per step",
    )


def _groups(trace: MemoryTrace, own: Int64) -> list[tuple[str, Int64]]:
    """Return the modules (rows) under each folded name, largest first, submodules included."""
    held = own.copy()
    for row in range(len(trace.modules) - 1, -1, -1):
        if trace.modules[row].parent >= 0:
            held[trace.modules[row].parent] += held[row]
    folded = folds([module.key for module in trace.modules])
    rows: dict[str, list[int]] = {}
    for row, module in enumerate(trace.modules):
        if module.is_module and held[row]:
            rows.setdefault(folded[module.key], []).append(row)
    total = {name: int(held[places].sum()) for name, places in rows.items()}
    largest = sorted(rows, key=lambda name: (-total[name], name))[:TRIED]
    return [(name, np.array(rows[name], np.int64)) for name in largest]


def _evidence(name: str, one: Recomputed, step: int) -> Evidence:
    calls = f"{one.calls:,} {'call' if one.calls == 1 else 'calls'}"
    a_ms = in_words(one.saved_bytes * 1e6 / max(one.forward_ns, 1))
    detail = f"{_ms(one)} of forward in {calls}; saves {a_ms} per ms; holds {in_words(one.held_bytes)}"
    return Evidence(_shown(name), one.saved_bytes, detail, where=_where(name, step))


def _where(name: str, step: int) -> Where:
    found = (("find", name),) if name else ()
    return Where("modules", (("step", str(step)), *found, ("sort", "activations")))


def _shown(name: str) -> str:
    return name or "(root)"


def _ms(one: Recomputed) -> str:
    return f"{one.forward_ns / 1e6:,.2f} ms"
