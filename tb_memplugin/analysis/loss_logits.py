"""Advice: a loss that stores copies of the logits of all tokens, often in float32."""

from __future__ import annotations

import numpy as np

from tb_memplugin.analysis.block_origins import StepBlocks, step_blocks
from tb_memplugin.analysis.findings import Evidence, Finding, Fine, NotJudged, Result, Where
from tb_memplugin.analysis.lines import line_evidence
from tb_memplugin.analysis.subcategories import is_loss, loss_copies
from tb_memplugin.analysis.units import size_text
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.tables import Bool

LEAST_SHARE = 0.05
"""Least share of the peak that must be gone without the copies for a finding."""


def loss_logits(trace: MemoryTrace, device: int) -> Result:
    """Find what a log-softmax stores beside the logits: a cast to float32, its result, their gradients.

    The logits themselves do not count. The finding's bytes are by how much the highest step's peak falls
    without the copies.
    """
    blocks = step_blocks(trace, device)
    if not any(origin.is_known for origin in blocks.origins):
        return NotJudged("The recording contains neither operators nor stacks.")
    backward = blocks.of(lambda origin: origin.is_backward)
    losses = np.flatnonzero(blocks.of(is_loss) & ~backward).astype(np.int64)
    if not len(losses):
        return Fine("No log-softmax keeps its result.")
    size = int(blocks.bytes[losses].max())
    losses = losses[blocks.bytes[losses] == size]
    copies, casts = loss_copies(trace, blocks, losses, backward)
    saved, peak = blocks.saved(copies), blocks.step.peak_bytes
    if saved < LEAST_SHARE * peak:
        return Fine(
            f"Without the copies that the loss makes of logits, the peak would be {size_text(saved)} lower."
        )
    return _finding(trace, device, blocks, copies, len(casts) > 0, saved)


def _finding(
    trace: MemoryTrace, device: int, blocks: StepBlocks, copies: Bool, is_cast: bool, saved: int
) -> Finding:
    step, rows = blocks.step, blocks.rows[copies & blocks.at_peak]
    each = int(blocks.bytes[copies].max())
    what = "casts the logits to float32 and keeps" if is_cast else "keeps"
    return Finding(
        kind="loss_logits",
        level="option",
        device=trace.devices[device].name,
        step=step.number,
        title=f"The loss {what} copies of the logits of all tokens, of {size_text(each)} each.",
        subject="",
        bytes=saved,
        measure="less at the peak",
        of_bytes=step.peak_bytes,
        evidence=(
            *line_evidence(trace, rows),
            Evidence(
                "the same peak without the copies", step.peak_bytes - saved, "by replay without them", False
            ),
        ),
        where=Where("allocations", (("step", str(step.number)), ("event", str(step.peak_event)))),
        what_to_do=(
            "Compute the loss over parts of the tokens, each with torch.utils.checkpoint, or with a fused "
            "linear cross-entropy (Liger, torchtune), which stores no logits either. Without the cast, the "
            "copies take half."
        ),
        price="a change to the code, and the last layer runs again in backward",
    )
