"""Advice: a loss that stores copies of the logits of all tokens, often in float32."""

from __future__ import annotations

import numpy as np

from tb_memplugin.analysis.block_origins import Judged
from tb_memplugin.analysis.findings import Finding, Fine, NotJudged, Result
from tb_memplugin.analysis.lines import line_evidence
from tb_memplugin.analysis.subcategories import is_loss, loss_copies
from tb_memplugin.analysis.units import size_text
from tb_memplugin.trace.tables import Bool

LEAST_SHARE = 0.05
"""Least share of the peak that must be gone without the copies for a finding."""


def loss_logits(judged: Judged) -> Result:
    """Find what a log-softmax stores beside the logits: a cast to float32, its result, their gradients.

    The logits themselves do not count. The finding's bytes are by how much the highest step's peak falls
    without the copies.
    """
    blocks = judged.blocks
    if not blocks.are_known:
        return NotJudged("The recording contains neither operators nor stacks.")
    backward = blocks.of(lambda origin: origin.is_backward)
    losses = np.flatnonzero(blocks.of(is_loss) & ~backward).astype(np.int64)
    if not len(losses):
        return Fine("No log-softmax keeps its result.")
    size = int(blocks.bytes[losses].max())
    losses = losses[blocks.bytes[losses] == size]
    copies, casts = loss_copies(judged.trace, blocks, losses, backward)
    saved = blocks.saved(copies)
    if saved < LEAST_SHARE * judged.step.peak_bytes:
        return Fine(
            f"Without the copies that the loss makes of logits, the peak would be {size_text(saved)} lower."
        )
    return _finding(judged, copies, len(casts) > 0, saved)


def _finding(judged: Judged, copies: Bool, is_cast: bool, saved: int) -> Finding:
    blocks = judged.blocks
    rows = blocks.rows[copies & blocks.at_peak]
    each = int(blocks.bytes[copies].max())
    what = "casts the logits to float32 and keeps" if is_cast else "keeps"
    return judged.finding(
        "loss_logits",
        "option",
        f"The loss {what} copies of the logits of all tokens, of {size_text(each)} each.",
        saved,
        (*line_evidence(judged.trace, rows), judged.without("the copies", saved)),
        "Compute the loss over parts of the tokens, each with torch.utils.checkpoint, or with a fused linear "
        "cross-entropy (Liger, torchtune), which stores no logits either. Without the cast, the copies take "
        "half.",
        view="allocations",
        state=judged.at_peak,
        price="a change to the code, and the last layer runs again in backward",
    )
