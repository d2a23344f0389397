"""Which blocks hold the scores of attention: batch x heads x length x length elements around a softmax."""

from __future__ import annotations

import re

import numpy as np

from tb_memplugin.analysis.block_origins import Origin, StepBlocks
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.frames import read_frame
from tb_memplugin.trace.kinds import NOT_DATA
from tb_memplugin.trace.tables import Bool, Int64

PRODUCTS = {"bmm", "baddbmm", "baddbmm_", "einsum", "matmul"}
LAYERS = {"linear", "mm", "addmm"}
"""Operators that multiply batches of matrices, as queries by keys; and those that multiply by a weight."""

_OTHER_WIDTH = re.compile(
    r"softmax|mask|dropout|where|bool|logical|bernoulli|^_?to(_|$)|^(eq|ne|[lg][te])(_|$)"
)
"""Operators that make scores of another dtype, or masks of them."""

NEAR = 24
"""The product is searched among so many blocks before the softmax: between them are a scale and a mask."""


def score_blocks(trace: MemoryTrace, blocks: StepBlocks) -> tuple[Bool, Int64]:
    """Return the mask of all blocks that hold scores, and the indices of the softmax's own.

    Scores are the blocks in the function (or module) of the softmax that have its size; casts and masks of
    half, double or a quarter of it; and the blocks of its size in backward, if no other block of the forward
    has that size.
    """
    seeds = np.flatnonzero(blocks.of(_is_softmax) & ~blocks.of(lambda origin: origin.is_backward))
    products = blocks.of(_is_product)
    softmax = seeds[_follow(blocks, products, seeds)].astype(np.int64)
    scores = np.zeros(len(blocks.rows), bool)
    own = np.isin(trace.allocations.category[blocks.rows], NOT_DATA)
    backward = blocks.of(lambda origin: origin.is_backward)
    other_width = blocks.of(lambda origin: any(_OTHER_WIDTH.search(name) for name in origin.names))
    for origin in np.unique(blocks.origin[softmax]).tolist():
        sizes = np.unique(blocks.bytes[softmax[blocks.origin[softmax] == origin]])
        site = _site(blocks.origins[origin])
        related_sizes = np.concatenate((sizes // 2, sizes * 2, sizes // 4))
        alike = ~own & (np.isin(blocks.bytes, sizes) | (np.isin(blocks.bytes, related_sizes) & other_width))
        makers = np.unique(blocks.origin[alike]).tolist()
        inside = [maker for maker in makers if _is_inside(blocks.origins[maker], site)]
        scores |= alike & np.isin(blocks.origin, inside)
    sizes = np.unique(blocks.bytes[softmax])
    other_blocks = ~scores & ~backward & ~own & blocks.of(lambda origin: origin.is_known) & (blocks.born >= 0)
    only = sizes[~np.isin(sizes, blocks.bytes[other_blocks])]
    nameless = ~blocks.of(lambda origin: origin.is_known) & (blocks.born >= 0)
    scores |= (backward | nameless) & ~own & np.isin(blocks.bytes, only)
    scores |= backward & ~own & blocks.of(_is_softmax) & np.isin(blocks.bytes, sizes)
    return scores, softmax


def _is_softmax(origin: Origin) -> bool:
    names = {name.lower() for name in origin.names} | {
        _function(origin.frames[0]).lower() if origin.frames else ""
    }
    return any("softmax" in name and "log" not in name for name in names)


def _is_product(origin: Origin) -> bool:
    """Return whether this is a product of batches, or, without operators, may be one of user code."""
    if not origin.names:
        return origin.is_direct
    return not PRODUCTS.isdisjoint(origin.names) and LAYERS.isdisjoint(origin.names)


def _function(frame: str) -> str:
    return read_frame(frame).function


def _follow(blocks: StepBlocks, products: Bool, seeds: Int64) -> Bool:
    """Return which softmaxes have a product of the same number of elements shortly before them."""
    follows, size = np.zeros(len(seeds), bool), blocks.bytes[seeds]
    for back in range(1, NEAR + 1):
        near = np.maximum(seeds - back, 0)
        other = blocks.bytes[near]
        follows |= products[near] & ((other == size) | (other == size // 2) | (other == 2 * size))
    return follows


Site = tuple[str, tuple[str, ...], int]


def _site(origin: Origin) -> Site:
    """Return the function that calls the softmax, with its callers; without frames, the module."""
    frames = [*origin.frames]
    while len(frames) > 1 and "softmax" in _function(frames[0]).lower():
        frames.pop(0)
    if not frames:
        return "", (), origin.module
    return _function(frames[0]), tuple(frames[1:]), origin.module


def _is_inside(origin: Origin, site: Site) -> bool:
    function, callers, module = site
    if not function:
        return not origin.frames and not origin.is_backward and origin.module == module
    if callers:
        at = len(origin.frames) - len(callers)
        return at > 0 and origin.frames[at:] == callers and _function(origin.frames[at - 1]) == function
    return bool(origin.frames) and _function(origin.frames[-1]) == function
