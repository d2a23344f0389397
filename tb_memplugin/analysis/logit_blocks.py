"""Which blocks hold logits, and what a log-softmax and its loss store beside them."""

from __future__ import annotations

import numpy as np

from tb_memplugin.analysis.block_origins import Origin, StepBlocks
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.kinds import NOT_DATA
from tb_memplugin.trace.tables import Bool, Int64

LOSSES = {"_log_softmax", "log_softmax", "log_softmax_int", "cross_entropy", "cross_entropy_loss"}
CASTS = {"_to_copy", "to", "to_dtype", "float"}
LAYERS = {"mm", "addmm", "linear"}

NEAR = 12
"""The cast to float32 is searched among so many blocks before the loss."""


def logit_blocks(trace: MemoryTrace, blocks: StepBlocks) -> Bool:
    """Return the mask of the blocks that hold logits: of the layer before a log-softmax, and copies.

    A log-softmax is the largest block of the loss. Without operators and stacks, none is known.
    """
    backward = blocks.of(lambda origin: origin.is_backward)
    losses = np.flatnonzero(blocks.of(is_loss) & ~backward).astype(np.int64)
    logits = np.zeros(len(blocks.rows), bool)
    if not len(losses):
        return logits
    first_of_loss = np.flatnonzero(np.diff(losses, prepend=losses[0] - NEAR - 1) > NEAR)
    largest = np.maximum.reduceat(blocks.bytes[losses], first_of_loss)
    is_layer = blocks.of(lambda origin: not LAYERS.isdisjoint(origin.names)) & ~backward
    for size in np.unique(largest).tolist():
        own = losses[blocks.bytes[losses] == size]
        logits |= loss_copies(trace, blocks, own, backward)[0]
        before = np.unique(np.maximum(own[:, None] - np.arange(1, NEAR + 1), 0))
        logits[before[is_layer[before] & np.isin(blocks.bytes[before], (size, size // 2))]] = True
    return logits


def is_loss(origin: Origin) -> bool:
    """Return whether a log-softmax, or a loss that contains one, allocated."""
    return not LOSSES.isdisjoint(origin.names)


def _is_cast(origin: Origin) -> bool:
    """Return whether this is a cast; without operators, whether user code may have written one."""
    return not CASTS.isdisjoint(origin.names) or (origin.is_direct and not origin.names)


def loss_copies(trace: MemoryTrace, blocks: StepBlocks, losses: Int64, backward: Bool) -> tuple[Bool, Int64]:
    """Return the mask of the copies of logits, and the indices of the casts among them.

    These are the blocks of exactly the size of the log-softmax that were allocated after the logits and as
    part of the loss: casts directly before it, what the loss allocates, and what backward allocates in that
    size, if no other block of forward has it. The logits themselves do not count.
    """
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
    other_blocks = alike & ~backward & ~nameless & ~copies & ~logits & (blocks.born >= 0)
    in_backward = alike & (backward | nameless)
    copies |= in_backward if not other_blocks.any() else in_backward & blocks.of(_is_loss_backward)
    return copies, casts


def _is_loss_backward(origin: Origin) -> bool:
    return any("logsoftmax" in name.lower().replace("_", "") or "NllLoss" in name for name in origin.names)
