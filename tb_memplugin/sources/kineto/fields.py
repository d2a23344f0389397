"""Fields of a Kineto trace's JSON as columns: whatever stands there, a number or a counted fault."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tb_memplugin.trace.tables import Bool, Int64

LATEST_US = 4 * 10**15
"""A time further from zero (the year 2096) is no time: two of them sum to 63 bits of nanoseconds."""

LONGEST_NUMBER = 40
"""Characters of a number that was written as a text."""

Column = tuple[Int64, Bool]
"""Values, and a mask of those that are there; the others are 0."""


def whole_column(values: Sequence[Any]) -> Column:
    """Whole numbers of 64 bits, with or without sign: int64 (those above 2**63 wrap) and what is there.

    Accepted: integers, floats without fraction, and texts of either, decimal or hexadecimal.
    """
    if set(map(type, values)) <= {int}:
        try:
            return np.fromiter(values, np.int64, len(values)), np.ones(len(values), bool)
        except OverflowError:
            pass
    return _column(map(_whole, values), len(values))


def time_column(values: Sequence[Any]) -> Column:
    """Times or durations in microseconds, whole or not, as nanoseconds: int64 and what is there."""
    kinds = set(map(type, values))
    if kinds <= {int}:
        number, there = whole_column(values)
        there = there & (number > -LATEST_US) & (number < LATEST_US)
        return np.where(there, number, 0) * 1_000, there
    if not kinds <= {int, float}:
        values = [_number(value) for value in values]
    written = np.array([_clipped(value) for value in values], np.float64)
    there = np.isfinite(written) & (np.abs(written) < LATEST_US)
    whole = np.floor(np.where(there, written, 0))
    rest = np.rint((np.where(there, written, 0) - whole) * 1_000).astype(np.int64)
    return whole.astype(np.int64) * 1_000 + rest, there


def _clipped(value: float) -> float:
    """The number, or infinity for an integer that no float holds."""
    return value if -LATEST_US < value < LATEST_US else np.inf


def _column(values: Iterable[int | None], count: int) -> Column:
    found = list(values)
    there = np.fromiter((value is not None for value in found), bool, count)
    return np.fromiter((value or 0 for value in found), np.int64, count), there


def _whole(value: object) -> int | None:
    number = _number(value)
    if isinstance(number, float):
        if not number.is_integer():  # neither are infinities and NaN
            return None
        number = int(number)
    if not -(1 << 63) <= number < 1 << 64:
        return None
    return number - (1 << 64) if number >= 1 << 63 else number


def _number(value: object) -> int | float:
    """The number in a value; NaN where it holds none."""
    if type(value) in (int, float):
        return value  # type: ignore[return-value]  # a bool is no number here
    if isinstance(value, str) and len(value) <= LONGEST_NUMBER:
        for read in (int, float, _hexadecimal):
            try:
                return read(value)
            except ValueError:
                continue
    return float("nan")


def _hexadecimal(text: str) -> int:
    return int(text, 16)
