"""Advice: a tensor that is many times as large as every other, such as all pairs of the rows of a batch."""

from __future__ import annotations

import numpy as np

from tb_memplugin.analysis.advice_rules.attention_scores import attention_scores
from tb_memplugin.analysis.advice_rules.avoidable_tensors import (
    old_copies,
    one_hot_vectors,
    repeated_values,
    wide_tensors,
)
from tb_memplugin.analysis.advice_rules.large_temporary import large_temporary
from tb_memplugin.analysis.advice_rules.loss_logits import loss_logits
from tb_memplugin.analysis.advice_rules.previous_result import previous_result
from tb_memplugin.analysis.block_origins import UNKNOWN_ORIGINS, Judged
from tb_memplugin.analysis.findings import Finding, Fine, Result
from tb_memplugin.analysis.units import counted, size_text
from tb_memplugin.trace import Phase
from tb_memplugin.trace.kinds import NOT_DATA

LEAST_SHARE = 0.2
"""Least share of the peak that must be gone without the tensor for a finding."""

TIMES = 16
"""How many times as large as every tensor of forward of less than half its size it must be."""

MOST, SHARE_OF_FORWARD = 4, 0.2
"""Most tensors of forward at the peak that are so large, and their most share of all tensors of forward.

More are caches, or the usual layers beside a narrow output.
"""

SCALAR = 8
"""Blocks of at most so many bytes do not count: a framework that logs makes many."""

KNOWN = (
    attention_scores,
    loss_logits,
    previous_result,
    large_temporary,
    repeated_values,
    one_hot_vectors,
    old_copies,
    wide_tensors,
)
"""Rules that know what such a tensor is, and say more of it: if their finding has most of its bytes."""


def outsized_tensor(judged: Judged) -> Result:
    """Find the largest tensors of forward if all others of the step are far smaller.

    At the peak, they or gradients of their size are alive. Sizes that parameters or their gradients have do
    not count. The finding's bytes are by how much the highest step's peak falls without these tensors and
    what backward allocates of at least half their size.
    """
    trace, blocks = judged.trace, judged.blocks
    if not blocks.are_known:
        return UNKNOWN_ORIGINS
    category = trace.allocations.category[blocks.rows]
    own = blocks.bytes[np.isin(category, NOT_DATA)]
    data = ~np.isin(category, NOT_DATA) & (blocks.born >= 0) & ~np.isin(blocks.bytes, own)
    forward = data & blocks.of(lambda origin: origin.is_known and not origin.is_backward)
    forward &= (trace.allocations.phase[blocks.rows] != Phase.BACKWARD) & (blocks.bytes > SCALAR)
    size = np.where(forward & np.isin(blocks.bytes, blocks.bytes[data & blocks.at_peak]), blocks.bytes, 0)
    largest = int(size.max(initial=0))
    is_large = 2 * blocks.bytes >= largest
    smaller = int(blocks.bytes[forward & ~is_large].max(initial=0))
    few = (forward & is_large & blocks.at_peak).sum() <= MOST
    few &= (forward & is_large).sum() <= SHARE_OF_FORWARD * forward.sum()
    if not few or not smaller or largest < TIMES * smaller:
        return Fine(f"No few tensors are more than {TIMES} times as large as all others of the step.")
    line = blocks.origins[blocks.origin[int(np.argmax(size))]].line.replace("{", "{{").replace("}", "}}")
    count = int((data & is_large & blocks.at_peak).sum())
    result = judged.avoidable(
        "outsized_tensor",
        "option",
        np.flatnonzero(data & is_large).astype(np.int64),
        f"{counted(count, 'tensor')} of up to {size_text(largest)} by {line or '{name}'}: "
        f"{largest // smaller:,} times as large as all others.",
        "The largest tensors are not at the peak",
        "Compute only what is used, such as the logits of the last token, or in parts. Broadcast a mask "
        "instead of expanding it, use torch.cdist for distances and a product of normalized matrices for "
        "similarities of all pairs, and keep a data set on the CPU.",
        least_share=LEAST_SHARE,
        price="a change to the code",
    )
    if not isinstance(result, Finding):
        return result
    known = (judged.result(rule) for rule in KNOWN)
    if any(isinstance(other, Finding) and 4 * other.bytes > 3 * result.bytes for other in known):
        return Fine("Another finding says what the largest tensor is.")
    return result
