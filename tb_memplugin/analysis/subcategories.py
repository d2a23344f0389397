"""The division of categories by what their blocks are: logits, attention scores, buffers of a collective."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tb_memplugin.analysis.annotations import innermost_at_birth
from tb_memplugin.analysis.block_origins import window_blocks
from tb_memplugin.analysis.logit_blocks import logit_blocks
from tb_memplugin.analysis.score_blocks import score_blocks
from tb_memplugin.analysis.sums import groups
from tb_memplugin.trace import STACKING_ORDER, Category, MemoryTrace
from tb_memplugin.trace.allocator import DEFAULT_POOL
from tb_memplugin.trace.labels import BUCKET
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

Column = npt.NDArray[np.signedinteger]

_FSDP_RANGE = "FSDP::"
_FSDP = re.compile(rf"{_FSDP_RANGE}|fsdp::|torch/distributed/(_composable/)?fsdp/")


@dataclass(frozen=True, slots=True)
class Subcategories:
    """A part for each allocation: `activation: logits`, or the category alone where nothing more is known.

    Attributes:
        part: indices in `keys`, int64, shape (allocations,).
        keys: the names of the parts. The first are those of all categories, in stacking order.
    """

    part: Int64
    keys: tuple[str, ...]

    @property
    def has_names(self) -> bool:
        """Whether any block has more than its category."""
        return len(self.keys) > len(STACKING_ORDER)


def subcategories(trace: MemoryTrace) -> Subcategories:
    """Return the subcategory of every allocation of a trace.

    The first that applies counts: the collective of a block of communication, attention scores, logits, and
    the private pool. Scores and logits are found as Advice finds them, by operators or stacks.
    """
    blocks = trace.allocations
    names: list[str] = [""]
    name = np.zeros(len(blocks), np.int64)
    for text, rows in _named(trace):
        if text not in names:
            names.append(text)
        name[rows[name[rows] == 0]] = names.index(text)
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
    for device in range(len(trace.devices)):
        blocks = window_blocks(trace, device)
        yield ATTENTION_SCORES, blocks.rows[score_blocks(trace, blocks)[0]]
        yield LOGITS, blocks.rows[logit_blocks(trace, blocks)]
    for row, pool in enumerate(trace.pools):
        if tuple(pool) != DEFAULT_POOL:
            is_graph = pool[1] == 0  # (0, n): a MemPool or a handle that graphs share
            yield GRAPH_POOL if is_graph else PRIVATE_POOL, _rows(trace.allocations.pool == row)


def _communication(trace: MemoryTrace) -> Iterator[tuple[str, Rows]]:
    """Yield the collectives of the blocks of communication."""
    blocks = trace.allocations
    rows = _rows(blocks.category == Category.COMMUNICATION)
    annotation = innermost_at_birth(trace, rows)
    columns: tuple[Column, ...] = (
        blocks.label[rows],
        blocks.operator[rows],
        annotation,
        blocks.stack[rows],
    )
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
