"""Comparison: what was added, removed, grown and shrunk between two moments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tb_memplugin.analysis.breakdown import Part

Status = Literal["added", "removed", "grown", "shrunk", "same"]


@dataclass(frozen=True, slots=True)
class Delta:
    """One key on both sides. `category` is the one that changed most within it, None if not known."""

    key: str
    status: Status
    base_bytes: int
    other_bytes: int
    base_count: int
    other_count: int
    category: str | None = None

    @property
    def delta_bytes(self) -> int:
        """Other minus base, bytes."""
        return self.other_bytes - self.base_bytes


def compare_parts(base: Sequence[Part], other: Sequence[Part]) -> tuple[Delta, ...]:
    """Every key of two breakdowns, largest change first.

    The deltas sum to the difference of the wholes. A key that is absent on one side counts 0 bytes
    there: it was added or removed, even where the other side holds it with 0 bytes.
    """
    left, right = {part.key: part for part in base}, {part.key: part for part in other}
    keys = {**left, **right}
    deltas = [_delta(key, left.get(key), right.get(key)) for key in keys]
    return tuple(
        sorted(
            deltas, key=lambda row: (-abs(row.delta_bytes), -max(row.base_bytes, row.other_bytes), row.key)
        )
    )


def _delta(key: str, base: Part | None, other: Part | None) -> Delta:
    before, after = base.bytes if base else 0, other.bytes if other else 0
    return Delta(
        key=key,
        status=_status(base, other),
        base_bytes=before,
        other_bytes=after,
        base_count=base.count if base else 0,
        other_count=other.count if other else 0,
        category=_changed_category(base.categories if base else {}, other.categories if other else {}),
    )


def _status(base: Part | None, other: Part | None) -> Status:
    if base is None:
        return "added"
    if other is None:
        return "removed"
    if base.bytes == other.bytes:
        return "same"
    return "grown" if other.bytes > base.bytes else "shrunk"


def _changed_category(base: dict[str, int], other: dict[str, int]) -> str | None:
    change = {key: abs(other.get(key, 0) - base.get(key, 0)) for key in {**base, **other}}
    return (
        max(change, key=lambda key: (change[key], max(base.get(key, 0), other.get(key, 0))))
        if change
        else None
    )
