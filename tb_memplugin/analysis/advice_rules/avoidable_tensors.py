"""Advice: tensors that need not be stored: repeated values, one-hot vectors, wide casts, old copies."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from tb_memplugin.analysis.autograd_graphs import Backwards
from tb_memplugin.analysis.block_origins import Judged, StepBlocks
from tb_memplugin.analysis.findings import Result
from tb_memplugin.analysis.subcategories import CASTS, logit_blocks
from tb_memplugin.trace import Category, Phase
from tb_memplugin.trace.kinds import NOT_DATA
from tb_memplugin.trace.tables import Bool, Int64


def _data(judged: Judged) -> Bool:
    """Return the mask of the blocks that were allocated outside of backward and are not the model's own."""
    blocks = judged.blocks
    own = np.isin(judged.trace.allocations.category[blocks.rows], NOT_DATA)
    return ~own & (blocks.born >= 0) & ~blocks.of(lambda origin: origin.is_backward)


def _rows(mask: Bool) -> Int64:
    return np.flatnonzero(mask).astype(np.int64)


def _first_of_each(keys: Int64, mask: Bool) -> Int64:
    """Return the first block (index) of each key among some blocks."""
    rows = _rows(mask)
    first: Int64 = rows[np.unique(keys[rows], return_index=True)[1]]
    return first


REPEATS = {
    "repeat",
    "repeat_interleave_self_int",
    "repeat_interleave_self_Tensor",
    "repeat_interleave",
    "tile",
}
COPIES = {"clone", "contiguous"}
MASKS = {"tril", "triu", "tril_", "triu_"}
TABLES = {"cos", "sin"}
"""Operators that repeat values; that copy a tensor, an expanded one in full; that make masks alike; and, if
their results are never freed, tables of positions."""

NEAR, MOST_TIMES, LEAST_SOURCE = 8, 4096, 1024
"""A copy may be one of the last so many blocks, unless all are smaller. An expanded one is of an alive block
that its size is a multiple of, at most so many times as large, and of so many bytes or more."""


def repeated_values(judged: Judged) -> Result:
    """Find tensors whose values are those of a smaller one, repeated: expanded masks, a table in each layer.

    A copy counts if no alive block is as large, and none of the last `NEAR` is larger: so it is one of an
    expanded tensor. The finding's bytes are by how much the highest step's peak falls without them.
    """
    blocks, data = judged.blocks, _data(judged)
    copies = _first_of_each(blocks.kinds, data & blocks.of_operators(COPIES) & blocks.at_peak)
    expanded = copies[np.array([_is_expanded(blocks, index) for index in copies.tolist()], bool)]
    chosen = data & (blocks.of_operators(REPEATS) | blocks.alike(expanded))
    tables = blocks.of_operators(TABLES) & (blocks.freed >= len(judged.trace.events))
    masks = data & (blocks.of_operators(MASKS) | tables) & blocks.at_peak
    masks[_first_of_each(blocks.kinds, masks)] = False
    chosen |= masks
    return judged.avoidable(
        "repeated_values",
        "problem",
        _rows(chosen),
        "The same values are stored many times by {name}.",
        "No large tensor repeats the values of a smaller one",
        "Broadcast: pass on what expand() returns without a copy (no contiguous(), clone() or repeat()), and "
        "share one mask, or table of positions, among the layers.",
    )


def _is_expanded(blocks: StepBlocks, index: int) -> bool:
    size, born = int(blocks.bytes[index]), blocks.born[index]
    alive = (blocks.born < born) & (blocks.freed > born) & ~blocks.of_operators(COPIES)
    near = slice(max(index - NEAR, 0), index)
    if (blocks.bytes[alive] == size).any() or (blocks.bytes[near][alive[near]] > size).any():
        return False
    sources = blocks.bytes[alive & (blocks.bytes >= max(LEAST_SOURCE, size // MOST_TIMES))]
    return bool(((sources < size) & (size % sources == 0)).any())


ONE_HOT = {"one_hot"}
AFTER_ONE_HOT = 3
"""A cast of one-hot vectors is one of so many blocks after them."""


def one_hot_vectors(judged: Judged) -> Result:
    """Find one-hot vectors and their casts. The bytes are by how much the peak falls without them."""
    blocks, data = judged.blocks, _data(judged)
    chosen = data & blocks.of_operators(ONE_HOT)
    casts = data & blocks.of_operators(CASTS | COPIES)
    for index in np.flatnonzero(chosen).tolist():
        after = slice(index + 1, index + 1 + AFTER_ONE_HOT)
        chosen[after] |= casts[after] & np.isin(blocks.bytes[after], blocks.bytes[index] // (1, 2, 4, 8))
    return judged.avoidable(
        "one_hot_vectors",
        "problem",
        _rows(chosen),
        "One-hot vectors are stored where their indices would do: {name}.",
        "No large one-hot vectors are stored",
        "Use the indices: cross_entropy and nll_loss take them as targets, embedding(indices, weight) is "
        "one_hot(indices) @ weight, and gather selects by them.",
    )


DENSE = {
    "embedding_dense_backward",
    "_embedding_bag_dense_backward",
    "EmbeddingBackward0",
    "EmbeddingBagBackward0",
}
LOOK_UPS = {"embedding", "embedding_bag", "_embedding_bag"}
"""Operators and nodes that allocate the gradient of all rows of an embedding; and what a look-up returns."""

LEAST_TIMES = 8
"""How many times as large as all that was looked up the gradient must be."""


def dense_embedding_gradient(judged: Judged) -> Result:
    """Find gradients of embeddings of whose rows few were looked up; those of tied weights do not count.

    The finding's bytes are by how much the highest step's peak falls without the gradients.
    """
    blocks = judged.blocks
    dense = blocks.of_operators(DENSE)
    tied = blocks.bytes[blocks.of(lambda origin: origin.is_backward) & ~dense]
    looked_up = blocks.bytes[_data(judged) & blocks.of_operators(LOOK_UPS)].max(initial=1)
    return judged.avoidable(
        "dense_embedding_gradient",
        "option",
        _rows(dense & (blocks.bytes >= LEAST_TIMES * looked_up) & ~np.isin(blocks.bytes, tied)),
        "The gradient of an embedding has all rows, though few were looked up: {name}.",
        "No embedding has a gradient that is far larger than what was looked up",
        "Give the embedding sparse=True, and its weight an optimizer that takes sparse gradients: SGD, "
        "Adagrad or SparseAdam.",
        least_share=0.1,
        price="the optimizer must take sparse gradients",
    )


FLOAT64_BYTES = 8

_COMPARISON = re.compile(r"(eq|ne|[lg][te]|logical|is(nan|inf|finite|in))(_|$)")
"""What begins the names of operators that make masks of bool."""


def wide_tensors(judged: Judged) -> Result:
    """Find tensors of float64 (`_float64`), that a cast widened and the same module goes on with, or masks.

    The finding's bytes are by how much the highest step's peak falls if they take half, and masks of numbers
    as much as what was cast. Logits in a loss do not count.
    """
    trace, blocks = judged.trace, judged.blocks
    wide, narrow = _float64(judged), blocks.bytes // 2
    title = "float64 takes much of the peak: {name}."
    if not wide.any():
        title = "A cast makes tensors twice as wide, and what follows stays so: {name}."
        casts = _data(judged) & blocks.of_operators(CASTS) & blocks.at_peak & ~logit_blocks(trace, blocks)
        masks = blocks.of(lambda origin: any(map(_COMPARISON.match, origin.names)))
        calls = blocks.kinds * (len(trace.modules) + 1) + trace.allocations.module[blocks.rows]
        for index in _first_of_each(calls, casts).tolist():
            before = np.flatnonzero(blocks.freed[:index] > blocks.born[index])[-1:]
            source = blocks.bytes[before].sum()
            if masks[before].any() and blocks.bytes[index] in (2 * source, 4 * source, 8 * source):
                title = "A mask is cast to numbers, and kept so: {name}."
                alike = blocks.alike(np.array([index], np.int64))
                wide |= alike
                narrow[alike] = source
            elif 2 * source == blocks.bytes[index]:
                wide |= blocks.alike(_rows(_goes_on(judged, index)))
    chosen = _rows(wide)
    return judged.avoidable(
        "wide_tensors",
        "option",
        chosen,
        title,
        "No float64, and no cast to a wider dtype, is kept",
        "Keep the narrower dtype: no .double(), no arrays of NumPy without .astype(numpy.float32), x * mask "
        "instead of x * mask.float(), and fused kernels, such as torch.nn.functional.dropout and rms_norm, "
        "which compute in float32 without storing it.",
        size=blocks.bytes[chosen] - narrow[chosen],
        least_share=0.1,
        price="other numerics",
    )


def _float64(judged: Judged) -> Bool:
    """Return the mask of the blocks in float64 by their tensors, or if every backward begins with 8 bytes.

    The gradient of such a loss is float64. So is everything where no backward casts, as of a model in
    float64; else what the program computes in the sizes of the gradients that are cast, as after a product
    with an array of NumPy.
    """
    trace, blocks = judged.trace, judged.blocks
    category = trace.allocations.category[blocks.rows]
    dtypes = np.array([*(tensor.dtype for tensor in trace.tensors), ""], object)
    wide: Bool = dtypes[trace.allocations.tensor[blocks.rows]] == "float64"
    begins = np.isin(blocks.born, judged.result(Backwards.of).first)
    begins &= blocks.of_operators({"ones_like"})
    if not begins.any() or (blocks.bytes[begins] != FLOAT64_BYTES).any():
        return wide
    casts = (trace.allocations.phase[blocks.rows] == Phase.BACKWARD) & blocks.of_operators(CASTS)
    if not casts.any():
        return ~np.isin(category, (Category.WORKSPACE, Category.COMMUNICATION))
    is_loss = ~blocks.of(lambda origin: origin.in_call) & ~np.isin(category, NOT_DATA)
    wide |= is_loss & np.isin(blocks.bytes, 2 * blocks.bytes[casts])
    return wide


def _goes_on(judged: Judged, cast: int) -> Bool:
    """Return the mask of the blocks of a cast's size in its module or, without one, in its function."""
    blocks, module = judged.blocks, judged.trace.allocations.module[judged.blocks.rows]
    alike: Bool = blocks.bytes == blocks.bytes[cast]
    if module[cast] >= 0:
        alike &= module == module[cast]
        return alike
    frames = blocks.origins[blocks.origin[cast]].frames[1:]
    alike &= blocks.of(lambda origin: origin.frames[1:] == frames)
    return alike


JOINS = {"cat", "concat", "hstack", "vstack", "pad"}
REORDERS = {"index_select", "index", "index_Tensor", "roll"}
"""Operators that copy a tensor into a larger one, and into another order. Layers of rising width are none."""

FEWEST_COPIES, MOST_GROWTH = 4, 2
"""A tensor is copied so many times, each time to at most so many times its size before."""

SOON = 16
"""Old copies are freed within so many events of the birth of the last new one, and four for each."""


def old_copies(judged: Judged) -> Result:
    """Find tensors that the same line replaces with copies while they are alive, as torch.cat in a loop.

    Copies of one size are matched in their order with those of the next size, or those outside of modules
    with those after the next forward. Without operators, a line outside of modules counts if its tensors grow
    by the same bytes each time. The finding's bytes are by how much the highest step's peak falls if each is
    freed when its successor is born, and the last one's bytes are there from the first on.
    """
    blocks, data = judged.blocks, _data(judged)
    by_operators = data & blocks.of_operators(JOINS | REORDERS)
    direct = blocks.of(lambda origin: origin.is_direct and not (origin.in_call or origin.names))
    order = _rows(by_operators | (data & direct))
    order = order[np.argsort(blocks.sites[order], kind="stable")]
    sites = np.split(order, np.flatnonzero(np.diff(blocks.sites[order])) + 1) if len(order) else ()
    pairs = [pair for rows in sites for pair in _replaced(blocks, rows, evenly=not by_operators[rows[0]])]
    old, new, last = np.concatenate((np.empty((3, 0), np.int64), *pairs), axis=1)
    final = blocks.bytes[last]
    return judged.avoidable(
        "old_copies",
        "problem",
        np.append(old, old),
        "What {name} made is kept until new copies of it are made.",
        "No line replaces tensors with new copies while they are alive",
        "Allocate a tensor of the final size once and write into parts of it, or free each old copy when its "
        "own new one is there.",
        gone=np.append(blocks.born[new], blocks.born[old]),
        size=np.append(final, blocks.bytes[old] - final),
    )


def _replaced(blocks: StepBlocks, rows: Int64, *, evenly: bool) -> Iterator[Int64]:
    """Yield old copies, their successors and last ones of the blocks (indices) of a line: shape (3, n).

    `evenly` says that each must be larger than the one before, by the same bytes. What is freed before a
    larger one is born, such as an operand, does not count then.
    """
    if evenly:
        born, size = np.append(blocks.born[rows[1:]], -1), np.append(blocks.bytes[rows[1:]], 0)
        rows = rows[(blocks.freed[rows] > born) | (blocks.bytes[rows] >= size)]
        if not len(rows):
            return
    in_call = blocks.of(lambda origin: origin.in_call)
    calls = np.where(in_call[rows], 0, np.cumsum(in_call)[rows])
    by_size = np.split(rows, np.flatnonzero((np.diff(blocks.bytes[rows]) != 0) | (np.diff(calls) != 0)) + 1)
    sizes = blocks.bytes[[copies[0] for copies in by_size]]
    rises = (sizes[1:] >= sizes[:-1]) & (sizes[1:] <= MOST_GROWTH * sizes[:-1])
    rises &= np.array([_is_replaced(blocks, old, new).any() for old, new in pairwise(by_size)], bool)
    if evenly:
        growth = np.diff(sizes)
        same = np.diff(growth) == 0
        rises &= (growth > 0) & (np.append(same, False) | np.append(False, same))
    ends = [*(np.flatnonzero(~rises) + 1).tolist(), len(sizes)]
    for first, end in zip([0, *ends], ends, strict=False):
        if end - first >= FEWEST_COPIES:
            for old, new in pairwise([_copied(blocks, *by_size[first : first + 2]), *by_size[first:end]]):
                gone = old[_is_replaced(blocks, old, new)]
                last = by_size[end - 1]
                count = min(len(gone), len(new), len(last))
                yield np.stack((gone[:count], new[:count], last[:count]))


def _is_replaced(blocks: StepBlocks, old: Int64, new: Int64) -> Bool:
    until = min(int(blocks.born[new[-1]]) + SOON + 4 * len(new), blocks.step.end - 1)
    replaced: Bool = (blocks.freed[old] > blocks.born[new[0]]) & (blocks.freed[old] <= until)
    return replaced


def _copied(blocks: StepBlocks, new: Int64, newer: Int64) -> Int64:
    """Return the blocks (indices) of other lines of which the first copies were made."""
    size, born, site = (column[new[0]] for column in (blocks.bytes, blocks.born, blocks.sites))
    most = size - (blocks.bytes[newer[0]] > size)
    old = _rows((blocks.bytes <= most) & (blocks.bytes * MOST_GROWTH >= size) & (blocks.sites != site))
    old = old[blocks.born[old] < born]
    copied: Int64 = old[_is_replaced(blocks, old, new)][-len(new) :]
    return copied
