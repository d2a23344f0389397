"""Advice: a loss that stores copies of the logits of all tokens, often in float32."""

from __future__ import annotations

import numpy as np

from tb_memplugin.analysis.block_origins import Judged
from tb_memplugin.analysis.findings import Result
from tb_memplugin.analysis.subcategories import is_loss, loss_copies
from tb_memplugin.analysis.units import size_text


def loss_logits(judged: Judged) -> Result:
    """Find what a log-softmax stores beside the logits: a cast to float32, its result, their gradients.

    The logits themselves do not count. The finding's bytes are by how much the highest step's peak falls
    without the copies.
    """
    blocks = judged.blocks
    backward = blocks.of(lambda origin: origin.is_backward)
    losses = np.flatnonzero(blocks.of(is_loss) & ~backward).astype(np.int64)
    losses = losses[blocks.bytes[losses] == blocks.bytes[losses].max(initial=0)]
    copies, casts = loss_copies(judged.trace, blocks, losses, backward)
    each = size_text(int(blocks.bytes[copies].max(initial=0)))
    what = "casts the logits to float32 and keeps" if len(casts) else "keeps"
    return judged.avoidable(
        "loss_logits",
        "option",
        np.flatnonzero(copies).astype(np.int64),
        f"The loss {what} copies of the logits of all tokens, of {each} each.",
        "No log-softmax keeps a large result",
        "Compute the loss over parts of the tokens, each with torch.utils.checkpoint, or with a fused linear "
        "cross-entropy (Liger, torchtune), which stores no logits either. Without the cast, the copies take "
        "half.",
        without="the copies",
        price="a change to the code, and the last layer runs again in backward",
    )
