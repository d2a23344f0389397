"""Advice: attention whose scores are stored, where a fused kernel stores none."""

from __future__ import annotations

import numpy as np

from tb_memplugin.analysis.block_origins import Judged
from tb_memplugin.analysis.findings import Result
from tb_memplugin.analysis.subcategories import score_blocks
from tb_memplugin.analysis.units import counted, size_text

SDPA = "scaled_dot_product_attention"
"""What the names of PyTorch's attention contain; its math kernel stores scores."""

FUSE = (
    "Call torch.nn.functional.scaled_dot_product_attention, or load the model with "
    'attn_implementation="sdpa": fused kernels compute attention without storing its scores.'
)
WHY_NOT_FUSED = (
    "scaled_dot_product_attention ran its math kernel here: either sdpa_kernel allows no other, or no fused "
    "kernel takes these inputs; for example, the last dimension of query, key and value must be contiguous. "
    "To be told why, call it in torch.nn.attention.sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION)."
)


def attention_scores(judged: Judged) -> Result:
    """Find blocks of batch x heads x length x length elements around a softmax over a product of batches.

    The finding's bytes are by how much the highest step's peak falls without them.
    """
    blocks = judged.blocks
    scores, softmax = score_blocks(judged.trace, blocks)
    uses_math = any(SDPA in name for row in blocks.origin[softmax] for name in blocks.origins[row].names)
    each = size_text(int(blocks.bytes[softmax].max(initial=0)))
    return judged.avoidable(
        "attention_scores",
        "option",
        np.flatnonzero(scores).astype(np.int64),
        f"Attention stores its scores: {{name}} keeps {each} in each of {counted(len(softmax), 'block')}.",
        "No softmax over the product of two batches of matrices keeps a large result",
        WHY_NOT_FUSED if uses_math else FUSE,
        without="scores",
        price="a change to the code; sums are rounded in another order",
    )
