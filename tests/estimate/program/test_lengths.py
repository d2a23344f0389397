"""Whether a number that is read becomes a length, by the instructions of the function that reads it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from tb_memplugin.estimate.program.lengths import is_length


class Read:
    """A tensor whose number is read: it remembers whether its reader makes a length of it."""

    def __init__(self) -> None:
        self.lengths: list[bool] = []

    def item(self) -> int:
        self.lengths.append(is_length(sys._getframe(1)))
        return 0

    def tolist(self) -> list[int]:
        self.lengths.append(is_length(sys._getframe(1)))
        return [0]

    __int__ = __index__ = item

    def zeros(self, *_: Any) -> int:
        return 0

    step = zeros


ROWS = list("abc")


def cuts(read: Read) -> object:
    return ROWS[: read.item()]


def cuts_by_a_variable(read: Read) -> object:
    end = read.item()
    return ROWS[:end]


def cuts_by_a_sum(read: Read) -> object:
    end = 1 + read.item()
    total = end * 2
    return ROWS[total:]


def cuts_by_int(read: Read) -> object:
    end = int(read)
    return ROWS[:end]


def writes_a_slice(read: Read) -> object:
    end, rows = read.item(), list(ROWS)
    rows[:end] = []
    return rows


def counts_up(read: Read) -> object:
    steps = read.item()
    return list(range(steps))


def allocates(read: Read) -> object:
    rows = read.item()
    return read.zeros((rows, 4), 1.0)


@pytest.mark.parametrize(
    "reader", [cuts, cuts_by_a_variable, cuts_by_a_sum, cuts_by_int, writes_a_slice, counts_up, allocates]
)
def test_a_bound_or_a_size_is_a_length(reader: Callable[[Read], object]) -> None:
    read = Read()
    reader(read)
    assert read.lengths == [True]


def looks_up(read: Read) -> object:
    return ROWS[read.item()]


def looks_up_a_variable(read: Read) -> object:
    index = read.item()
    return ROWS[index], {0: 1}.get(index)


def acts(read: Read) -> object:
    action = read.item()
    return read.step(action)


def collects(read: Read) -> object:
    tokens: list[int] = []
    for _ in range(2):
        tokens.append(read.item())
    return tokens[:1]


def writes_there(read: Read) -> object:
    rows, index = list(ROWS), read.item()
    rows[index] = "d"
    return rows[:]


def cuts_at_an_end(read: Read) -> object:
    tokens = read.tolist()
    return tokens[: tokens.index(0)]


def compares(read: Read) -> object:
    return "end" if read.item() == 3 else list(range(2))


@pytest.mark.parametrize(
    "reader", [looks_up, looks_up_a_variable, acts, collects, writes_there, cuts_at_an_end, compares]
)
def test_an_index_is_no_length(reader: Callable[[Read], object]) -> None:
    read = Read()
    reader(read)
    assert read.lengths
    assert not any(read.lengths)


def test_a_length_of_a_script_is_seen_too() -> None:
    read = Read()
    exec("n = read.item()\nread.zeros(n)", {"read": read})
    exec("n = read.item()\nread.step(n)", {"read": read})
    assert read.lengths == [True, False]
