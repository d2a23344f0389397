"""Advice: attention whose scores are stored, where a fused kernel stores none."""

from __future__ import annotations

import numpy as np

from tb_memplugin.analysis.block_origins import Judged
from tb_memplugin.analysis.findings import Finding, Fine, NotJudged, Result
from tb_memplugin.analysis.lines import line_evidence
from tb_memplugin.analysis.subcategories import score_blocks
from tb_memplugin.analysis.units import counted, size_text
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.tables import NO_OPERATOR, ROOT, Bool, Int64

LEAST_SHARE = 0.05
"""Least share of the peak that must be gone without the scores for a finding."""

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
    if not blocks.are_known:
        return NotJudged("The recording contains neither operators nor stacks.")
    scores, softmax = score_blocks(judged.trace, blocks)
    if not len(softmax):
        return Fine("No softmax over the product of two batches of matrices keeps its result.")
    saved = blocks.saved(scores)
    if saved < LEAST_SHARE * judged.step.peak_bytes:
        return Fine(f"Without the scores of attention, the peak would be only {size_text(saved)} lower.")
    return _finding(judged, scores, softmax, saved)


def _finding(judged: Judged, scores: Bool, softmax: Int64, saved: int) -> Finding:
    trace, blocks = judged.trace, judged.blocks
    largest = int(softmax[np.argmax(blocks.bytes[softmax])])
    origin = blocks.origins[blocks.origin[largest]]
    name = origin.line or _module_name(trace, origin.module)
    at_peak = blocks.rows[scores & blocks.at_peak]
    each = int(blocks.bytes[largest])
    return judged.finding(
        "attention_scores",
        "option",
        f"Attention stores its scores: {name} keeps {size_text(each)} in each of "
        f"{counted(len(softmax), 'block')}.",
        saved,
        (*line_evidence(trace, at_peak), judged.without("scores", saved)),
        FUSE if not any(SDPA in name for name in origin.names) else WHY_NOT_FUSED,
        view="allocations",
        state=[("block", str(int(blocks.rows[largest])))],
        subject=name,
        price="a change to the code; sums are rounded in another order",
    )


def _module_name(trace: MemoryTrace, module: int) -> str:
    return (trace.modules[module].key or ROOT) if module >= 0 else NO_OPERATOR
