"""How amounts are told in words: the unit of bytes, and singular or plural.

The rule for units is the same in commands, reports and the tab (its state/bytes.ts).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

NAMES = ("B", "KiB", "MiB", "GiB", "TiB")

FEWEST = 4
"""Fewer of a unit are shown in the next smaller one, because two decimals would hide too much: 1,290.24 MiB
instead of 1.26 GiB."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit of bytes: `MiB`, 1048576."""

    name: str
    bytes: int

    @classmethod
    def for_bytes(cls, sizes: Iterable[float]) -> Unit:
        """Return the largest unit of which the largest of these sizes has at least four."""
        largest = max((abs(size) for size in sizes), default=0)
        power = 0
        while power + 1 < len(NAMES) and largest >= FEWEST * 1024 ** (power + 1):
            power += 1
        return cls(NAMES[power], 1024**power)

    def show(self, size: float) -> str:
        """Return a size without its unit: `12.50`, or the whole number in bytes."""
        return f"{size:,.0f}" if self.bytes == 1 else f"{size / self.bytes:,.2f}"

    def text(self, size: float) -> str:
        """Return a size with its unit."""
        return f"{self.show(size)} {self.name}"


def size_text(size: float) -> str:
    """Return a size in the unit that suits it: `4.94 GiB`, `512 B`."""
    return Unit.for_bytes([size]).text(size)


def part_text(size: float, total: float) -> str:
    """Return a part in the unit of its whole; only less than one of that has a smaller unit."""
    unit = Unit.for_bytes([total])
    return unit.text(size) if abs(size) >= unit.bytes else size_text(size)


def counted(count: int, word: str) -> str:
    """Return a number with its noun: `1 step`, `2,000 steps`."""
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"
