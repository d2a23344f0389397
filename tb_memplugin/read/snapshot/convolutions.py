"""What a convolution frees before it returns, in a snapshot with Python's frames alone: cuDNN's workspaces.

Frames of Python do not say where an operator ends. A line of torch/nn/modules/conv.py calls one operator,
which allocates its result first. Frames of C++ name workspaces themselves.
"""

from __future__ import annotations

import re

import numpy as np

from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.tables import Bool

_CONVOLUTION = re.compile(r"(_conv_forward|forward) .*torch[/\\]nn[/\\]modules[/\\]conv\.py:\d+")


def freed_in_convolution(trace: MemoryTrace) -> Bool:
    """Return a mask of blocks that a convolution allocated after its result and freed before it returned.

    Such a block is freed before the device allocates again, while the block just before it, of the same
    stack and another size, is alive. Where two convolutions of a line follow one another, as in
    `second(first(x))`, the first is freed instead; what `first(x).add_(second(x))` adds has the size of
    its result.

    Returns:
        bool, shape (allocations,).
    """
    blocks = trace.allocations
    mask = np.zeros(len(blocks), bool)
    of_stack = [bool(stack) and bool(_CONVOLUTION.fullmatch(stack[0])) for stack in trace.stacks]
    is_convolution = np.array([*of_stack, False])[blocks.stack]
    for device in range(len(trace.devices) if is_convolution.any() else 0):
        rows = np.flatnonzero((blocks.device == device) & (blocks.born >= 0))
        born, freed, stack = blocks.born[rows], blocks.freed[rows], blocks.stack[rows]
        is_next = (stack[1:] == stack[:-1]) & (blocks.bytes[rows[1:]] != blocks.bytes[rows[:-1]])
        is_brief = freed[1:] < np.append(born[2:], len(trace.events))
        mask[rows[1:]] = is_convolution[rows[1:]] & is_next & is_brief & (freed[:-1] > freed[1:])
    return mask
