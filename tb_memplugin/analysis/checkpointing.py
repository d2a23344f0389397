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
"""Of the peak that is gone with checkpointing."""

NEARLY = 0.9
"""Of the best saving: modules that reach it are as good, and the one with the least time wins."""

TRIED = 24
"""Modules looked at: those that hold most at the peak."""

SHOWN, SHOWN_SHARE = 8, 0.01
"""Modules shown, and how much of the peak each must save."""


def checkpointing(trace: MemoryTrace, device: int) -> Result:
    """The modules, layers that repeat being one, whose checkpointing lowers the highest step's peak most.

    Its bytes are by how much the peak falls at least, see `recompute.Recomputed`; what the checkpoint
    itself keeps beside inputs (random state, 5 KB a call on the CPU) is not counted.
    """
    blocks = trace.allocations
    if not (trace.calls.phase == Phase.FORWARD).any() or not (trace.calls.phase == Phase.BACKWARD).any():
        return NotJudged("It needs the modules' calls in forward and backward: give the recorder the model.")
    if not ((blocks.category == Category.ACTIVATION) & (blocks.device == device)).any():
        return NotJudged("The recording tells no activations from other memory.")
    step = highest_step(trace, device)
    activations = Activations(trace, device, step)
    groups = _groups(trace, activations.own_bytes(step.peak_event))
    found = [(name, activations.recomputed(rows)) for name, rows in groups]
    found = [(name, one) for name, one in found if one.saved_bytes > 0]
    if not found:
        return Fine(f"Recomputing no module would lower the peak of step {step.number}.")
    most = max(one.saved_bytes for _, one in found)
    if most < LEAST_SHARE * step.peak_bytes:
        return Fine(
            f"Recomputing any module would lower the peak of step {step.number} by "
            f"{in_words(most)} ({share(most, step.peak_bytes)}) at most."
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
        title=f"Recompute {_shown(name)} in backward instead of keeping its activations ({calls} a step).",
        subject=_shown(name),
        bytes=best.saved_bytes,
        measure="less at the peak",
        of_bytes=step.peak_bytes,
        evidence=tuple(_evidence(name, one, step.number) for name, one in found[:SHOWN]),
        where=_where(name, step.number),
        what_to_do="Call it through torch.utils.checkpoint.checkpoint(module, x, use_reentrant=False).",
        price=f"its forward once more: {_ms(best)} a step",
    )


def _groups(trace: MemoryTrace, own: Int64) -> list[tuple[str, Int64]]:
    """Modules under one folded name, those that hold most, with what is inside them, first."""
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
    detail = f"{_ms(one)} of forward in {calls}; {a_ms} for each ms; holds {in_words(one.held_bytes)}"
    return Evidence(_shown(name), one.saved_bytes, detail, where=_where(name, step))


def _where(name: str, step: int) -> Where:
    found = (("find", name),) if name else ()
    return Where("modules", (("step", str(step)), *found, ("sort", "activations")))


def _shown(name: str) -> str:
    return name or "(root)"


def _ms(one: Recomputed) -> str:
    return f"{one.forward_ns / 1e6:,.2f} ms"
