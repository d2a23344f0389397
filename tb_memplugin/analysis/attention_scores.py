"""Advice: attention whose scores are stored, where a fused kernel stores none."""

from __future__ import annotations

import re

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
from tb_memplugin.analysis.units import counted, size_text
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.frames import read_frame
from tb_memplugin.trace.tables import NO_OPERATOR, ROOT, Bool, Int64

LEAST_SHARE = 0.05
"""Least share of the peak that must be gone without the scores for a finding."""

PRODUCTS = {"bmm", "baddbmm", "baddbmm_", "einsum", "matmul"}
LAYERS = {"linear", "mm", "addmm"}
"""Operators that multiply batches of matrices, as queries by keys; and those that multiply by a weight."""

_OTHER_WIDTH = re.compile(
    r"softmax|mask|dropout|where|bool|logical|bernoulli|^_?to(_|$)|^(eq|ne|[lg][te])(_|$)"
)
"""Operators that make scores of another dtype, or masks of them."""

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

NEAR = 24
"""The product is searched among so many blocks before the softmax: between them are a scale and a mask."""


def attention_scores(trace: MemoryTrace, device: int) -> Result:
    """Find blocks of batch x heads x length x length elements around a softmax over a product of batches.

    Scores are the blocks in the function (or module) of the softmax that have its size; casts and masks of
    half, double or a quarter of it; and the blocks of its size in backward, if no
    other block of the forward has that size. The finding's bytes are by how much the highest step's peak
    falls without them.
    """
    blocks = step_blocks(trace, device)
    if not any(origin.is_known for origin in blocks.origins):
        return NotJudged("The recording contains neither operators nor stacks.")
    scores, softmax = _scores(trace, blocks)
    if not len(softmax):
        return Fine("No softmax over the product of two batches of matrices keeps its result.")
    saved = blocks.saved(scores)
    peak = blocks.step.peak_bytes
    if saved < LEAST_SHARE * peak:
        return Fine(f"Without the scores of attention, the peak would be only {size_text(saved)} lower.")
    return _finding(trace, device, blocks, scores, softmax, saved)


def _scores(trace: MemoryTrace, blocks: StepBlocks) -> tuple[Bool, Int64]:
    """Return the mask of all blocks that hold scores, and the indices of the softmax's own."""
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
        inside = blocks.of(lambda other, site=site: _is_inside(other, site))  # type: ignore[misc]
        others = np.concatenate((sizes // 2, sizes * 2, sizes // 4))
        alike = np.isin(blocks.bytes, sizes) | (np.isin(blocks.bytes, others) & other_width)
        scores |= inside & ~own & alike
    sizes = np.unique(blocks.bytes[softmax])
    others = ~scores & ~backward & ~own & blocks.of(lambda origin: origin.is_known) & (blocks.born >= 0)
    only = sizes[~np.isin(sizes, blocks.bytes[others])]
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


def _finding(
    trace: MemoryTrace, device: int, blocks: StepBlocks, scores: Bool, softmax: Int64, saved: int
) -> Finding:
    step = blocks.step
    largest = int(softmax[np.argmax(blocks.bytes[softmax])])
    origin = blocks.origins[blocks.origin[largest]]
    name = origin.line or _module_name(trace, origin.module)
    at_peak = blocks.rows[scores & blocks.at_peak]
    each = int(blocks.bytes[largest])
    return Finding(
        kind="attention_scores",
        level="option",
        device=trace.devices[device].name,
        step=step.number,
        title=f"Attention stores its scores: {name} keeps {size_text(each)} in each of "
        f"{counted(len(softmax), 'block')}.",
        subject=name,
        bytes=saved,
        measure="less at the peak",
        of_bytes=step.peak_bytes,
        evidence=(
            *line_evidence(trace, at_peak),
            Evidence(
                "the same peak without scores", step.peak_bytes - saved, "by replay without them", False
            ),
        ),
        where=Where("allocations", (("step", str(step.number)), ("block", str(int(blocks.rows[largest]))))),
        what_to_do=FUSE if not any(SDPA in name for name in origin.names) else WHY_NOT_FUSED,
        price="a change to the code; sums are rounded in another order",
    )


def _module_name(trace: MemoryTrace, module: int) -> str:
    return (trace.modules[module].key or ROOT) if module >= 0 else NO_OPERATOR
