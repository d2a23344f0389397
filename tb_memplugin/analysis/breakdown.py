"""What is alive at a moment, divided into parts that sum to the whole."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from tb_memplugin.errors import MemPluginError
from tb_memplugin.trace import Category, MemoryTrace, Phase
from tb_memplugin.trace.tables import NOT_NAMED, Int64

By = Literal["category", "module", "operator", "phase"]
DIVISIONS: tuple[By, ...] = get_args(By)

BEFORE_WINDOW = "(before the window)"
"""The operator of what was alive when the window began: it cannot be known."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a whole: `bytes` in `count` blocks. `categories` divides the bytes again (modules only)."""

    key: str
    bytes: int
    count: int
    categories: dict[str, int] = field(default_factory=dict)


def codes(trace: MemoryTrace, by: By) -> tuple[Int64, tuple[str, ...]]:
    """The part to which every allocation belongs.

    Returns:
        int64 of shape (allocations,), indices into the tuple of keys.

    Raises:
        MemPluginError: `by` is none of `DIVISIONS`.
    """
    blocks = trace.allocations
    if by == "category":
        return blocks.category.astype(np.int64), tuple(category.key for category in Category)
    if by == "phase":
        return blocks.phase.astype(np.int64), tuple(phase.key for phase in Phase)
    if by == "module":
        return blocks.module.astype(np.int64) + 1, (NOT_NAMED, *(module.key for module in trace.modules))
    if by == "operator":
        return blocks.operator.astype(np.int64) + 1, (BEFORE_WINDOW, *trace.operators)
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
    alive = trace.allocations.alive_at(event, device)
    part, keys = codes(trace, by)
    size = trace.allocations.bytes[alive]
    part = part[alive]
    found, inverse = np.unique(part, return_inverse=True)
    total = sums(inverse, size, len(found))
    count = np.bincount(inverse, minlength=len(found))
    inner: list[dict[str, int]] = [{} for _ in found]
    if by == "module":
        inner = _categories_of(inverse, trace.allocations.category[alive], size, len(found))
    parts: dict[str, Part] = {}
    for row in np.argsort(-total, kind="stable"):
        new = Part(keys[found[row]], int(total[row]), int(count[row]), inner[row])
        parts[new.key] = merged(parts[new.key], new) if new.key in parts else new
    return tuple(sorted(parts.values(), key=lambda item: -item.bytes))


def sums(group: Int64, size: Int64, groups: int) -> Int64:
    """Exact integer sums of `size` within each group: int64, shape (groups,)."""
    total = np.zeros(groups, np.int64)
    np.add.at(total, group, size)
    return total


def _categories_of(group: Int64, category: np.ndarray, size: Int64, groups: int) -> list[dict[str, int]]:
    table = sums(group * len(Category) + category, size, groups * len(Category)).reshape(
        groups, len(Category)
    )
    keys = [category.key for category in Category]
    return [{key: size for key, size in zip(keys, row, strict=True) if size} for row in table.tolist()]


def merged(a: Part, b: Part) -> Part:
    """Two rows with one key: tables may name a thing twice, people should see it once."""
    categories = {
        key: a.categories.get(key, 0) + b.categories.get(key, 0) for key in {**a.categories, **b.categories}
    }
    return Part(a.key, a.bytes + b.bytes, a.count + b.count, categories)
