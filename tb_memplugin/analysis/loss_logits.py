"""Advice: a loss that stores copies of the logits of all tokens, often in float32."""

from __future__ import annotations

import numpy as np

from tb_memplugin.analysis.block_origins import Origin, StepBlocks, step_blocks
from tb_memplugin.analysis.findings import (
    Evidence,
    Finding,
    Fine,
    NotJudged,
    Result,
    Where,
    line_evidence,
)
from tb_memplugin.analysis.peak_holders import NOT_DATA
from tb_memplugin.analysis.units import size_text
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.tables import Bool, Int64

LEAST_SHARE = 0.05
"""Least share of the peak that must be gone without the copies for a finding."""

LOSSES = {"_log_softmax", "log_softmax", "log_softmax_int", "cross_entropy", "cross_entropy_loss"}
CASTS = {"_to_copy", "to", "to_dtype", "float"}
LAYERS = {"mm", "addmm", "linear"}

NEAR = 12
"""The cast to float32 is searched among so many blocks before the loss."""


def loss_logits(trace: MemoryTrace, device: int) -> Result:
    """Find what a log-softmax stores beside the logits: a cast to float32, its result, their gradients.

    These are the blocks of exactly the size of the log-softmax that were allocated after the logits and as
    part of the loss: casts directly before it, what the loss allocates, and what backward allocates in that
    size, if no other block of forward has it. The logits themselves do not count. The finding's bytes are
    by how much the highest step's peak falls without the copies.
    """
    blocks = step_blocks(trace, device)
    if not any(origin.is_known for origin in blocks.origins):
        return NotJudged("The recording contains neither operators nor stacks.")
    backward = blocks.of(lambda origin: origin.is_backward)
    losses = np.flatnonzero(blocks.of(_is_loss) & ~backward).astype(np.int64)
    if not len(losses):
        return Fine("No log-softmax keeps its result.")
    size = int(blocks.bytes[losses].max())
    losses = losses[blocks.bytes[losses] == size]
    copies, casts = _copies(trace, blocks, losses, backward)
    saved, peak = blocks.saved(copies), blocks.step.peak_bytes
    if saved < LEAST_SHARE * peak:
        return Fine(
            f"Without the copies that the loss makes of logits, the peak would be {size_text(saved)} lower."
        )
    return _finding(trace, device, blocks, copies, len(casts) > 0, saved)


def _is_loss(origin: Origin) -> bool:
    return not LOSSES.isdisjoint(origin.names)


def _is_cast(origin: Origin) -> bool:
    """Return whether this is a cast; without operators, whether user code may have written one."""
    return not CASTS.isdisjoint(origin.names) or (origin.is_direct and not origin.names)


def _copies(trace: MemoryTrace, blocks: StepBlocks, losses: Int64, backward: Bool) -> tuple[Bool, Int64]:
    """Return the mask of the copies of logits, and the indices of the casts among them."""
    size = int(blocks.bytes[losses[0]])
    alike = (blocks.bytes == size) & ~np.isin(trace.allocations.category[blocks.rows], NOT_DATA)
    is_cast = alike & blocks.of(_is_cast) & ~backward
    near = np.zeros(len(alike), bool)
    for loss in losses.tolist():
        near[max(loss - NEAR, 0) : loss] = True
    casts = np.flatnonzero(is_cast & near)
    copies = np.zeros(len(alike), bool)
    copies[losses] = True
    copies[casts] = True
    logits = blocks.of(lambda origin: not LAYERS.isdisjoint(origin.names)) & ~backward
    nameless = ~blocks.of(lambda origin: origin.is_known) & (blocks.born > blocks.born[losses[0]])
    others = alike & ~backward & ~nameless & ~copies & ~logits & (blocks.born >= 0)
    in_backward = alike & (backward | nameless)
    copies |= in_backward if not others.any() else in_backward & blocks.of(_is_loss_backward)
    return copies, casts


def _is_loss_backward(origin: Origin) -> bool:
    return any("logsoftmax" in name.lower().replace("_", "") or "NllLoss" in name for name in origin.names)


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
