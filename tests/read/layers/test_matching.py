"""The longest common subsequence, against the table of dynamic programming."""

from __future__ import annotations

import random

from tb_memplugin.read.layers.backward import longest_common, surely_common


def _sets(text: str) -> list[frozenset[str]]:
    return [frozenset(letter) for letter in text]


def _length(rows: str, columns: str) -> int:
    best = [[0] * (len(columns) + 1) for _ in range(len(rows) + 1)]
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            best[i + 1][j + 1] = best[i][j] + 1 if row == column else max(best[i][j + 1], best[i + 1][j])
    return best[-1][-1]


def test_equal_sequences_match_in_order() -> None:
    assert longest_common(_sets("abc"), _sets("abc")) == {0: 0, 1: 1, 2: 2}


def test_what_only_one_sequence_has_is_left_out() -> None:
    assert longest_common(_sets("axb"), _sets("aby")) == {0: 0, 1: 2}


def test_sets_match_if_they_share_a_name() -> None:
    assert longest_common([frozenset(("linear", "addmm"))], [frozenset(("addmm",))]) == {0: 0}
    assert longest_common([frozenset(("linear",))], [frozenset(("addmm",))]) == {}


def test_nothing_matches_an_empty_sequence() -> None:
    assert longest_common([], _sets("ab")) == {} == longest_common(_sets("ab"), [])


def test_random_sequences_match_in_order_and_as_long_as_any() -> None:
    chance = random.Random(0)
    for _ in range(300):
        rows, columns = ("".join(chance.choices("abcd", k=chance.randrange(12))) for _ in range(2))
        match = longest_common(_sets(rows), _sets(columns))
        assert all(rows[row] == columns[column] for column, row in match.items())
        in_order = [match[column] for column in sorted(match)]
        assert in_order == sorted(set(in_order))
        assert len(match) == _length(rows, columns)


def test_a_match_that_another_as_long_contradicts_is_not_sure() -> None:
    """Of two rows `a`, the first or the last may be the column's; `b` matches in one way."""
    assert surely_common(_sets("aab"), _sets("ab"), ["first", "last", "b"]) == {1: 2}
    assert surely_common(_sets("aab"), _sets("ab"), ["same", "same", "b"]).keys() == {0, 1}
    assert surely_common(_sets("abc"), _sets("abc"), "xyz") == {0: 0, 1: 1, 2: 2}


def test_a_column_is_not_sure_if_another_may_be_of_its_row() -> None:
    """The row `a` may be the first column or the last. Where the order differs, no row has two columns."""
    assert surely_common(_sets("a"), _sets("aa"), ["of_a"]) == {}
    assert surely_common(_sets("cdab"), _sets("abcd"), "mmmm") == {0: 2, 1: 3, 2: 0, 3: 1}
