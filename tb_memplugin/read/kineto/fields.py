"""Convert fields of a Kineto trace's JSON to columns, marking values that are not valid numbers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from tb_memplugin.trace.tables import Bool, Int64

LATEST_US = 4 * 10**15
"""Times in microseconds must be closer to zero than this (the year 2096), so that the sum of two fits 63 bits
of nanoseconds."""

LONGEST_NUMBER = 40
"""The largest number of characters of a number written as text."""

Column = tuple[Int64, Bool]
"""Values, and a mask of the valid ones; the others are 0."""


def whole_column(values: Sequence[Any]) -> Column:
    """Return 64-bit integers, signed or unsigned, as int64 (those from 2**63 wrap), and the valid mask.

    Accepted are integers, floats without a fraction, and texts of either, decimal or hexadecimal.
    """
    if set(map(type, values)) <= {int}:
        try:
            return np.fromiter(values, np.int64, len(values)), np.ones(len(values), bool)
        except OverflowError:
            pass
    integers = list(map(_integer, values))
    there = np.fromiter((value is not None for value in integers), bool, len(integers))
    return np.fromiter((value or 0 for value in integers), np.int64, len(integers)), there


def time_column(values: Sequence[Any]) -> Column:
    """Return times or durations in microseconds, whole or not, as int64 nanoseconds, and the valid mask."""
    kinds = set(map(type, values))
    if kinds <= {int}:
        number, there = whole_column(values)
        there = there & (number > -LATEST_US) & (number < LATEST_US)
        return np.where(there, number, 0) * 1_000, there
    if not kinds <= {int, float}:
        values = [_number(value) for value in values]
    written = np.array([_clipped(value) for value in values], np.float64)
    there = np.isfinite(written) & (np.abs(written) < LATEST_US)
    microseconds = np.floor(np.where(there, written, 0))
    rest = np.rint((np.where(there, written, 0) - microseconds) * 1_000).astype(np.int64)
    return microseconds.astype(np.int64) * 1_000 + rest, there


def _clipped(value: float) -> float:
    """Return the number, or infinity if it is out of the range of times."""
    return value if -LATEST_US < value < LATEST_US else np.inf


def _integer(value: object) -> int | None:
    number = _number(value)
    if isinstance(number, float):
        if not number.is_integer():  # neither are infinities and NaN
            return None
        number = int(number)
    if not -(1 << 63) <= number < 1 << 64:
        return None
    return number - (1 << 64) if number >= 1 << 63 else number


def _number(value: object) -> int | float:
    """Return the number in a value, NaN if it is not one."""
    if type(value) in (int, float):
        return value  # type: ignore[return-value]  # bool is not accepted as a number
    if isinstance(value, str) and len(value) <= LONGEST_NUMBER:
        for read in (int, float, partial(int, base=16)):
            try:
                return read(value)
            except ValueError:
                continue
    return float("nan")


EPOCH_FROM_NS = 10**18
"""Times from this on (September 2001) are already counted from the epoch."""


def base_ns(written: object, first_ns: int) -> int:
    """Return the epoch nanoseconds of a trace's time 0; 0 if its times count from the epoch.

    Args:
        written: its `baseTimeNanoseconds`.
        first_ns: its first time, as it is written.
    """
    number, there = whole_column([written])
    base = int(number[0])
    usable = there[0] and 0 <= base < LATEST_US * 1_000 and first_ns < EPOCH_FROM_NS
    return base if usable else 0
