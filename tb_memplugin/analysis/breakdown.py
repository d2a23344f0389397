"""What is alive at a moment, divided into parts that sum to the whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from tb_memplugin.errors import MemPluginError
from tb_memplugin.trace import Category, MemoryTrace, Phase
from tb_memplugin.trace.tables import NO_OPERATOR, NOT_NAMED, Int64

By = Literal["category", "module", "operator", "phase"]
DIVISIONS: tuple[By, ...] = get_args(By)

BEFORE_WINDOW = "(before the window)"
"""The operator of what was alive when the window began: it cannot be known."""


_CATEGORY_KEYS = tuple(category.key for category in Category)

Rows = npt.NDArray[np.intp] | slice
_ALL = slice(None)


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a whole: `bytes` in `count` blocks. `categories` divides the bytes again (modules only)."""

    key: str
    bytes: int
    count: int
    categories: dict[str, int] = field(default_factory=dict)


def codes(trace: MemoryTrace, by: By, rows: Rows = _ALL) -> tuple[Int64, tuple[str, ...]]:
    """The part to which allocations belong.

    Args:
        trace: any trace.
        by: what to divide by.
        rows: which allocations; default: every one.

    Returns:
        int64, one entry per chosen allocation, indices into the tuple of keys.

    Raises:
        MemPluginError: `by` is none of `DIVISIONS`.
    """
    blocks = trace.allocations
    if by == "category":
        return blocks.category[rows].astype(np.int64), _CATEGORY_KEYS
    if by == "phase":
        return blocks.phase[rows].astype(np.int64), tuple(phase.key for phase in Phase)
    if by == "module":
        return blocks.module[rows].astype(np.int64) + 1, (
            NOT_NAMED,
            *(module.key for module in trace.modules),
        )
    if by == "operator":
        known = np.where(blocks.born[rows] < 0, 0, blocks.operator[rows].astype(np.int64) + 2)
        return known, (BEFORE_WINDOW, NO_OPERATOR, *trace.operators)
    raise MemPluginError(
        f"Cannot divide memory by {by!r}.", where="by", fix=f"Choose one of: {', '.join(DIVISIONS)}."
    )


def breakdown(trace: MemoryTrace, device: int, event: int, by: By) -> tuple[Part, ...]:
    """The live bytes on a device after an event, in parts that sum to them, largest first.

    Args:
        trace: any trace.
        device: row in `trace.devices`.
        event: index of an event; -1 is the moment before the first.
        by: what to divide by.

    Raises:
        MemPluginError: `by` is none of `DIVISIONS`.
    """
    return parts_of(trace, trace.allocations.alive_at(event, device), by)


def parts_of(trace: MemoryTrace, rows: npt.NDArray[np.intp], by: By) -> tuple[Part, ...]:
    """The bytes of some allocations (rows of `trace.allocations`), in parts, largest first.

    Raises:
        MemPluginError: `by` is none of `DIVISIONS`.
    """
    part, keys = codes(trace, by, rows)
    size = trace.allocations.bytes[rows]
    count = np.bincount(part, minlength=len(keys))
    total = sums(part, size, len(keys))
    found = np.flatnonzero(count)
    found = found[np.argsort(-total[found], kind="stable")]
    inner: list[dict[str, int]] = [{}] * len(found)
    if by == "module":
        table = sums(part * len(Category) + trace.allocations.category[rows], size, len(keys) * len(Category))
        inner = [_named(row) for row in table.reshape(-1, len(Category))[found].tolist()]
    columns = (total[found].tolist(), count[found].tolist(), inner)
    parts: dict[str, Part] = {}
    for row, bytes_, blocks, categories in zip(found.tolist(), *columns, strict=True):
        new = Part(keys[row], bytes_, blocks, categories)
        parts[new.key] = merged(parts[new.key], new) if new.key in parts else new
    if len(parts) == len(found):
        return tuple(parts.values())
    return tuple(sorted(parts.values(), key=lambda item: -item.bytes))


def sums(group: Int64, size: Int64, groups: int) -> Int64:
    """Exact integer sums of `size` within each group: int64, shape (groups,)."""
    total = np.zeros(groups, np.int64)
    np.add.at(total, group, size)
    return total


def _named(row: list[int]) -> dict[str, int]:
    return {key: size for key, size in zip(_CATEGORY_KEYS, row, strict=True) if size}


def merged(a: Part, b: Part) -> Part:
    """Two rows with one key: tables may name a thing twice, people should see it once."""
    categories = {
        key: a.categories.get(key, 0) + b.categories.get(key, 0) for key in {**a.categories, **b.categories}
    }
    return Part(a.key, a.bytes + b.bytes, a.count + b.count, categories)
