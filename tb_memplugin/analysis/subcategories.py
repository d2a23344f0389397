"""The division of categories by what their blocks are: logits, buffers of a collective, a data set."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from tb_memplugin.analysis.annotations import innermost_at_birth
from tb_memplugin.analysis.block_origins import Origin, StepBlocks, window_blocks
from tb_memplugin.analysis.divisions import Subcategories
from tb_memplugin.analysis.sums import groups
from tb_memplugin.trace import STACKING_ORDER, Category, MemoryTrace, Reason
from tb_memplugin.trace.allocator import DEFAULT_POOL
from tb_memplugin.trace.frames import distinct, read_frame
from tb_memplugin.trace.kinds import NOT_DATA
from tb_memplugin.trace.labels import ALIVE_BEFORE, BUCKET, any_element
from tb_memplugin.trace.tables import Bool, Int64, Rows

LOGITS = "logits"
ATTENTION_SCORES = "attention scores"
GRAPH_POOL = "CUDA graph pool"
PRIVATE_POOL = "private pool"
"""A pool of `torch.cuda.MemPool`, or one of CUDA graphs that `torch.cuda.graph_pool_handle` made."""

DDP_BUCKETS = "DDP buckets"
"""In which `DistributedDataParallel` reduces gradients."""

_COLLECTIVES = tuple(
    (name, re.compile(pattern, re.IGNORECASE))
    for name, pattern in (
        (DDP_BUCKETS, r"_ddp_init_helper|c10d::Reducer"),
        ("all-gather", r"all_?gather|unsharded_(flat_)?param"),
        ("reduce-scatter", r"reduce_?scatter|chunk_cat|foreach_reduce|_reduce_grad|post_backward_reduce"),
        ("all-reduce", r"all_?reduce"),
        ("all-to-all", r"all_?to_?all"),
        ("broadcast", r"broadcast|_sync_(module_states|buffers|module_buffers|params_and_buffers)"),
    )
)
"""What an operator, a range of FSDP2 or a frame says of the collective that allocates."""

_SOFTMAX_OR_LOSS = re.compile("softmax|cross_entropy", re.IGNORECASE)
"""What an operator or a frame contains wherever scores or logits are found."""

Column = npt.NDArray[np.signedinteger]

_FSDP_RANGE = "FSDP::"
_FSDP = re.compile(rf"{_FSDP_RANGE}|fsdp::|torch/distributed/(_composable/)?fsdp/")


def has_subcategories(trace: MemoryTrace) -> bool:
    """Return whether any allocation has more than its category."""
    return any(len(rows) for _, rows in _named(trace))


def subcategories(trace: MemoryTrace) -> Subcategories:
    """Return the subcategory of every allocation of a trace.

    The first that applies counts: the collective of a block of communication, attention scores, logits, the
    private pool, and the variable. Scores and logits are found as Advice finds them, by operators or stacks.
    """
    blocks = trace.allocations
    codes = {"": 0}
    name = np.zeros(len(blocks), np.int64)
    for text, rows in _named(trace):
        name[rows[name[rows] == 0]] = codes.setdefault(text, len(codes))
    names = list(codes)
    position = np.argsort(STACKING_ORDER)[blocks.category]
    keys = [category.key for category in STACKING_ORDER]
    code = position * len(names) + name
    first, part = groups(code, len(keys) * len(names))
    of_used = []
    for both in code[first].tolist():
        category, named = divmod(both, len(names))
        of_used.append(len(keys) if named else category)
        keys += [f"{keys[category]}: {names[named]}"] if named else []
    return Subcategories(np.array(of_used, np.int64)[part], tuple(keys))


def _named(trace: MemoryTrace) -> Iterator[tuple[str, Rows]]:
    """Yield names, and rows of allocations that have them unless an earlier one applies."""
    yield from _communication(trace)
    texts = (*trace.operators, *distinct(trace.stacks))
    has_attention_or_loss = any(map(_SOFTMAX_OR_LOSS.search, texts))  # else no origin is one of them
    for device in range(len(trace.devices)) if has_attention_or_loss else ():
        blocks = window_blocks(trace, device)
        yield ATTENTION_SCORES, blocks.rows[score_blocks(trace, blocks)[0]]
        yield LOGITS, blocks.rows[logit_blocks(trace, blocks)]
    for row, pool in enumerate(trace.pools):
        if tuple(pool) != DEFAULT_POOL:
            is_graph = pool[1] == 0  # (0, n): a MemPool or a handle that graphs share
            yield GRAPH_POOL if is_graph else PRIVATE_POOL, _rows(trace.allocations.pool == row)
    yield from variables(trace)


def variables(trace: MemoryTrace) -> Iterator[tuple[str, Rows]]:
    """Yield `variable data` or `ALIVE_BEFORE`, and its rows of blocks of which nothing else is known.

    They were alive when the recording began. The elements of a list or dictionary are one: `replay[*]`.
    """
    blocks = trace.allocations
    rows = _rows(
        (blocks.category == Category.UNKNOWN) & (blocks.reason == Reason.REACHABLE) & (blocks.label >= 0)
    )
    labels: dict[str, list[int]] = {}
    for label in np.unique(blocks.label[rows]).tolist():
        labels.setdefault(any_element(trace.labels[label]), []).append(label)
    for name, of_name in labels.items():
        key = name if name == ALIVE_BEFORE else f"variable {name}"
        yield key, rows[np.isin(blocks.label[rows], of_name)]


def _communication(trace: MemoryTrace) -> Iterator[tuple[str, Rows]]:
    """Yield the collectives of the blocks of communication."""
    blocks = trace.allocations
    rows = _rows(blocks.category == Category.COMMUNICATION)
    annotation = innermost_at_birth(trace, rows)
    columns: tuple[Column, ...] = (blocks.label[rows], blocks.operator[rows], annotation, blocks.stack[rows])
    tables = (trace.labels, trace.operators, trace.annotation_names, trace.stacks)
    first, group = np.zeros(1, np.intp), np.zeros(len(rows), np.int64)
    for column, table in zip(columns, tables, strict=True):
        end = len(table) + 1
        first, group = groups(group * end + column + 1, max(len(first), 1) * end)
    for number, at in enumerate(first.tolist()):
        label, operator, range_, stack = (int(column[at]) for column in columns)
        texts = [trace.operators[operator] if operator >= 0 else "", *trace.stack(stack)]
        if range_ >= 0 and trace.annotation_names[range_].startswith(_FSDP_RANGE):
            texts.insert(0, trace.annotation_names[range_])
        is_bucket = label >= 0 and trace.labels[label].startswith(BUCKET)
        if name := DDP_BUCKETS if is_bucket else _collective(texts):
            yield name, rows[group == number]


def _collective(texts: Sequence[str]) -> str:
    """Return the collective that allocated, by the first text that names one, "" if none does."""
    name = next((name for text in texts for name, sign in _COLLECTIVES if sign.search(text)), "")
    by_fsdp = name not in ("", DDP_BUCKETS) and any(_FSDP.search(text) for text in texts)
    return f"FSDP {name}" if by_fsdp else name


def _rows(mask: Bool) -> Rows:
    return np.flatnonzero(mask)


PRODUCTS = {"bmm", "baddbmm", "baddbmm_", "einsum", "matmul", "multi_head_attention_forward"}
LAYERS = {"linear", "mm", "addmm"}
"""Operators that multiply batches of matrices, as queries by keys; and those that multiply by a weight."""

_OTHER_WIDTH = re.compile(
    r"softmax|mask|dropout|where|bool|logical|bernoulli|^_?to(_|$)|^(eq|ne|[lg][te])(_|$)"
)
"""Operators that make scores of another dtype, or masks of them."""

NEAR_SOFTMAX = 24
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
    """Return whether this is a product of batches, or, without operators, may be one of a module's code."""
    if not origin.names:
        return origin.is_direct and origin.in_call
    return not PRODUCTS.isdisjoint(origin.names) and not _is_layer(origin)


def _function(frame: str) -> str:
    return read_frame(frame).function


def _follow(blocks: StepBlocks, products: Bool, seeds: Int64) -> Bool:
    """Return which softmaxes have a product of the same number of elements shortly before them."""
    follows, size = np.zeros(len(seeds), bool), blocks.bytes[seeds]
    for back in range(1, NEAR_SOFTMAX + 1):
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


LOSSES = {"_log_softmax", "log_softmax", "log_softmax_int", "cross_entropy", "cross_entropy_loss"}
CASTS = {"_to_copy", "to", "to_dtype", "float"}

NEAR_LOSS = 12
"""Casts to float32 are searched among so many blocks before the loss, and after it."""


def logit_blocks(trace: MemoryTrace, blocks: StepBlocks) -> Bool:
    """Return the mask of the blocks that hold logits: of the layer before a log-softmax, and copies.

    A log-softmax is the largest block of the loss. Without operators and stacks, none is known.
    """
    backward = blocks.of(lambda origin: origin.is_backward)
    losses = np.flatnonzero(blocks.of(is_loss) & ~backward).astype(np.int64)
    logits = np.zeros(len(blocks.rows), bool)
    if not len(losses):
        return logits
    first_of_loss = np.flatnonzero(np.diff(losses, prepend=losses[0] - NEAR_LOSS - 1) > NEAR_LOSS)
    largest = np.maximum.reduceat(blocks.bytes[losses], first_of_loss)
    is_layer = blocks.of(_is_layer) & ~backward
    for size in np.unique(largest).tolist():
        own = losses[blocks.bytes[losses] == size]
        logits |= loss_copies(trace, blocks, own, backward)[0]
        before = np.unique(np.maximum(own[:, None] - np.arange(1, NEAR_LOSS + 1), 0))
        logits[before[is_layer[before] & np.isin(blocks.bytes[before], (size, size // 2))]] = True
    return logits


def _is_layer(origin: Origin) -> bool:
    return not LAYERS.isdisjoint(origin.names)


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
    if not len(losses):
        return np.zeros(len(blocks.rows), bool), losses
    size = int(blocks.bytes[losses[0]])
    alike = (blocks.bytes == size) & ~np.isin(trace.allocations.category[blocks.rows], NOT_DATA)
    is_cast = alike & blocks.of(_is_cast) & ~backward
    near = np.zeros(len(alike), bool)
    for loss in losses.tolist():
        near[max(loss - NEAR_LOSS, 0) : loss + NEAR_LOSS] = True
    casts = np.flatnonzero(is_cast & near)
    copies = np.zeros(len(alike), bool)
    copies[losses] = True
    copies[casts] = True
    logits = blocks.of(_is_layer) & ~backward
    nameless = ~blocks.of(lambda origin: origin.is_known) & (blocks.born > blocks.born[losses[0]])
    other_blocks = alike & ~backward & ~nameless & ~copies & ~logits & (blocks.born >= 0)
    in_backward = alike & (backward | nameless)
    copies |= in_backward if not other_blocks.any() else in_backward & blocks.of(_is_loss_backward)
    return copies, casts


def _is_loss_backward(origin: Origin) -> bool:
    return any("logsoftmax" in name.lower().replace("_", "") or "NllLoss" in name for name in origin.names)
