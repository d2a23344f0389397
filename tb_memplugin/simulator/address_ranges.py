"""A set of address ranges that grows and shrinks, such as the memory that an allocator has reserved."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Range(Generic[T]):
    """Addresses from `start` (included) to `end` (excluded), and their owner."""

    start: int
    end: int
    owner: T


class Ranges(Generic[T]):
    """Ranges that never overlap, in address order. Adjacent ranges are not joined."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ranges: list[Range[T]] = []

    def __len__(self) -> int:
        return len(self._ranges)

    def __iter__(self) -> Iterator[Range[T]]:
        return iter(self._ranges)

    def add(self, start: int, end: int, owner: T) -> int:
        """Add a range. Where it overlaps existing ranges, those stay as they are.

        Returns:
            The number of bytes that were there already; 0 if the whole range is new.
        """
        if end <= start:
            return 0
        first, last = self._touched(start, end)
        if first == last:
            self._splice(first, first, [Range(start, end, owner)])
            return 0
        overlapping = self._ranges[first:last]
        edges = [start, *(edge for old in overlapping for edge in (old.start, old.end)), end]
        gaps = [
            Range(low, high, owner) for low, high in zip(edges[::2], edges[1::2], strict=True) if low < high
        ]
        self._splice(first, last, sorted([*overlapping, *gaps], key=lambda part: part.start))
        return end - start - sum(gap.end - gap.start for gap in gaps)

    def remove(self, start: int, end: int) -> int:
        """Remove a range. Ranges that cross its edges are cut.

        Returns:
            The number of bytes that were not there; 0 if the whole range was.
        """
        if end <= start:
            return 0
        first, last = self._touched(start, end)
        missing = end - start
        kept = []
        for old in self._ranges[first:last]:
            missing -= min(old.end, end) - max(old.start, start)
            if old.start < start:
                kept.append(Range(old.start, start, old.owner))
            if old.end > end:
                kept.append(Range(end, old.end, old.owner))
        self._splice(first, last, kept)
        return missing

    def at(self, address: int) -> Range[T] | None:
        """Return the range that contains an address, None if there is none."""
        index = bisect_right(self._starts, address) - 1
        part = self._ranges[index] if index >= 0 else None
        return part if part is not None and address < part.end else None

    def _touched(self, start: int, end: int) -> tuple[int, int]:
        """Return (first, last) such that the ranges [first, last) overlap the addresses [start, end)."""
        first = bisect_right(self._starts, start) - 1
        if first < 0 or self._ranges[first].end <= start:
            first += 1
        return first, bisect_left(self._starts, end, lo=first)

    def _splice(self, first: int, last: int, parts: list[Range[T]]) -> None:
        self._ranges[first:last] = parts
        self._starts[first:last] = [part.start for part in parts]
