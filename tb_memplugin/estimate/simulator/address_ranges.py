"""A set of address ranges that grows and shrinks: what an allocator has reserved."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Range(Generic[T]):
    """Addresses from `start` up to and without `end`, and what they belong to."""

    start: int
    end: int
    owner: T


class Ranges(Generic[T]):
    """Ranges that never overlap, in address order. Neighbours are not joined."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ranges: list[Range[T]] = []

    def __len__(self) -> int:
        return len(self._ranges)

    def __iter__(self) -> Iterator[Range[T]]:
        return iter(self._ranges)

    def add(self, start: int, end: int, owner: T) -> int:
        """Put a range in; where another one lies already, that one stays.

        Returns:
            The bytes that were not new, 0 where all is well.
        """
        if end <= start:
            return 0
        first, last = self._touched(start, end)
        if first == last:
            self._splice(first, first, [Range(start, end, owner)])
            return 0
        taken = self._ranges[first:last]
        edges = [start, *(edge for old in taken for edge in (old.start, old.end)), end]
        gaps = [
            Range(low, high, owner) for low, high in zip(edges[::2], edges[1::2], strict=True) if low < high
        ]
        self._splice(first, last, sorted([*taken, *gaps], key=lambda part: part.start))
        return end - start - sum(gap.end - gap.start for gap in gaps)

    def remove(self, start: int, end: int) -> int:
        """Take a range out; what lies across its edges is cut.

        Returns:
            The bytes that were not there to be taken, 0 where all is well.
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
        """The range that holds an address."""
        place = bisect_right(self._starts, address) - 1
        found = self._ranges[place] if place >= 0 else None
        return found if found is not None and address < found.end else None

    def _touched(self, start: int, end: int) -> tuple[int, int]:
        """The half-open places of the ranges that share an address with [start, end)."""
        first = bisect_right(self._starts, start) - 1
        if first < 0 or self._ranges[first].end <= start:
            first += 1
        return first, bisect_left(self._starts, end, lo=first)

    def _splice(self, first: int, last: int, parts: list[Range[T]]) -> None:
        self._ranges[first:last] = parts
        self._starts[first:last] = [part.start for part in parts]
