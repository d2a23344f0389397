"""Match two sequences in order: the longest common subsequence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)


def surely_common(
    rows: Sequence[frozenset[Name]], columns: Sequence[frozenset[Name]], owner: Sequence[object]
) -> dict[int, int]:
    """Return the matches of longest common subsequences on which the first and the last of these agree.

    Several may be equally long. A match that only one of the two has is agreed on if the other has none of
    its row.

    Args:
        rows, columns: as in `longest_common`.
        owner: what the match with each row says of a column: different rows may say the same.
    """
    first = longest_common(rows, columns)
    end_row, end_column = len(rows) - 1, len(columns) - 1
    reverse = longest_common(rows[::-1], columns[::-1]).items()
    last = {end_column - column: end_row - row for column, row in reverse}
    times, both = Counter([*first.values(), *last.values()]), first.keys() & last.keys()
    return {
        column: row
        for column, row in {**last, **first}.items()
        if (owner[row] == owner[last[column]] if column in both else times[row] == 1)
    }


def longest_common(rows: Sequence[frozenset[Name]], columns: Sequence[frozenset[Name]]) -> dict[int, int]:
    """Return a longest common subsequence: for each matched column, its row. They match if they share a name.

    The bits of an integer stand for the columns (M. Crochemore and others, Information Processing Letters 80,
    2001): a bit is 0 where the longest common subsequence of the rows so far and the columns up to there is
    one longer than up to the column before.
    """
    of_name: dict[Name, int] = {}
    for column, names in enumerate(columns):
        for name in names:
            of_name[name] = of_name.get(name, 0) | 1 << column
    every = (1 << len(columns)) - 1
    bits, history = every, []
    for names in rows:
        fits = 0
        for name in names:
            fits |= of_name.get(name, 0)
        shared = bits & fits
        bits = ((bits + shared) | (bits - shared)) & every
        history.append(bits)
    match: dict[int, int] = {}
    row, column = len(rows), len(columns)
    while row and column:
        if history[row - 1] >> (column - 1) & 1:
            column -= 1
            continue
        row -= 1
        if not row or history[row - 1] >> (column - 1) & 1:
            column -= 1
            match[column] = row
    return match
