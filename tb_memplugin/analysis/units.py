"""How amounts are told in words: the unit of bytes, and singular or plural.

The rule for units is the same in commands, reports and the tab (its state/bytes.ts).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal

from tb_memplugin.errors import MemPluginError

NAMES = ("B", "KiB", "MiB", "GiB", "TiB")

BYTES_OF = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
BYTES_OF |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
MOST_BYTES = 1 << 60


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit of bytes: `MiB`, 1048576."""

    name: str
    bytes: int

    @classmethod
    def for_bytes(cls, sizes: Iterable[float]) -> Unit:
        """Return the largest unit of which the largest of these sizes has at least one."""
        largest = max((abs(size) for size in sizes), default=0)
        power = 0
        while power + 1 < len(NAMES) and largest >= 1024 ** (power + 1):
            power += 1
        return cls(NAMES[power], 1024**power)

    def show(self, size: float) -> str:
        """Return a size without its unit, in three or four digits: `12.50`, `154.8`; in bytes, whole.

        What is there is never 0.00, but `< 0.01` or `> -0.01`.
        """
        if size and self.bytes > 1 and abs(size) / self.bytes < 0.005:
            return "< 0.01" if size > 0 else "> -0.01"
        value = size / self.bytes
        decimals = 0 if self.bytes == 1 or abs(value) >= 999.95 else 1 if abs(value) >= 99.995 else 2
        return f"{Decimal(value).quantize(Decimal(10) ** -decimals, ROUND_HALF_UP):,}"  # as the tab rounds

    def signed(self, change: float) -> str:
        """Return a change without its unit: `+12.50`, `-3.00`, `0.00`, `< +0.01`."""
        shown = self.show(change)
        return shown if change <= 0 else shown.replace("< ", "< +") if "<" in shown else f"+{shown}"

    def text(self, size: float) -> str:
        """Return a size with its unit."""
        return f"{self.show(size)} {self.name}"


def size_text(size: float) -> str:
    """Return a size in the unit that suits it: `4.94 GiB`, `512 B`."""
    return Unit.for_bytes([size]).text(size)


def part_text(size: float, total: float) -> str:
    """Return a part in the unit of its whole; only less than a tenth of that has a smaller unit."""
    unit = Unit.for_bytes([total])
    return unit.text(size) if abs(size) >= unit.bytes / 10 else size_text(size)


def counted(count: int, word: str) -> str:
    """Return a number with its noun: `1 step`, `2,000 steps`."""
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def read_size(text: str, where: str, least: int = 1) -> int:
    """Return the bytes of a size such as `24GiB`, `24 GB` or `25769803776`.

    Args:
        text: the size; bytes are whole.
        least: the fewest bytes that it may be.

    Raises:
        MemPluginError: the text is no size.
    """
    parts = re.fullmatch(r"(\d{1,18}(?:\.\d{1,9})?)\s*([A-Za-z]*)", text.strip())
    number, unit = (parts[1], BYTES_OF.get(parts[2], 0)) if parts else ("", 0)
    is_whole = number.isdecimal()
    size = int(number) * unit if is_whole else int(float(number or 0) * unit)
    if not unit or (unit == 1 and not is_whole) or not least <= size <= MOST_BYTES:
        raise MemPluginError(
            f"{text[:80]!r} is not a size.",
            where=where,
            fix="Give bytes, or a number with MiB, GiB, MB or GB.",
        )
    return size
