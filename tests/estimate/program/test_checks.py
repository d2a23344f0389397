"""Which truth of a condition raises no error, by the instructions that follow the read."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from tb_memplugin.estimate.program.checks import passing


class Value:
    """A value whose truth is read: it remembers what `passing` says of the reader."""

    def __init__(self, truth: bool) -> None:
        self.truth = truth
        self.answers: list[bool | None] = []

    def __bool__(self) -> bool:
        self.answers.append(passing(sys._getframe(1)))
        return self.truth

    def all(self) -> Value:
        return self

    def __invert__(self) -> Value:
        return self

    def isnan(self) -> Value:
        return self

    def isfinite(self) -> Value:
        return self

    def item(self) -> bool:
        self.answers.append(passing(sys._getframe(1)))
        return self.truth


def raises_if_not(value: Value) -> None:
    if not value.all():
        raise ValueError(f"{value}")


def raises_if_item(value: Value) -> None:
    if value.item():
        message = "bad"
        raise ValueError(message)


def raises_otherwise(value: Value) -> str:
    if value.all():
        text = "good"
    else:
        raise ValueError
    return text


def asserts(value: Value) -> None:
    assert value, "all of it"


def raises_for_a_variable(value: Value) -> None:
    valid = value.item()
    if not valid:
        raise ValueError


def raises_for_one_of_two(value: Value) -> None:
    if value.all() or value.all():
        raise ValueError


def raises_for_two_of_two(value: Value) -> None:
    if value.all() and value.all():
        raise ValueError


def raises_one_of_two_errors(value: Value) -> None:
    if not bool(value):
        if isinstance(value, str):
            raise TypeError
        raise ValueError


def skips_what_is_not_a_number(value: Value) -> int:
    for _ in range(1):
        if value.isnan():
            continue
    return 1


def goes_on_if_finite(value: Value) -> int:
    return 2 if value.isfinite().all() else 1


def asks_of_each(value: Value) -> bool:
    return any(not each.isfinite().all() for each in [value])


def asks_for_the_inverse(value: Value) -> bool:
    return (~value.isfinite()).all().item()


def asks_beside(value: Value) -> tuple[bool, bool]:
    return repr(value.isfinite()) == "", value.all().item()


def chooses(value: Value) -> int:
    return 2 if value.all() else 1


def compares_with_a_truth(value: Value) -> None:
    if value.item() == False:  # noqa: E712
        raise ValueError


def raises_later(value: Value) -> None:
    count = 1 if value else 2
    if count > 3:
        raise ValueError


def returns_early(value: Value) -> int | None:
    if value.all():
        count = len(str(value))
        if count > 1_000:
            raise ValueError
        return count
    return None


def in_a_sum(value: Value) -> int:
    return value.item() + 1


@pytest.mark.parametrize(
    ("reader", "truth"),
    [
        (raises_if_not, True),
        (raises_if_item, False),
        (raises_otherwise, True),
        (asserts, True),
        (raises_for_a_variable, True),
        (raises_for_one_of_two, False),
        (raises_for_two_of_two, False),
        (raises_one_of_two_errors, True),
        (skips_what_is_not_a_number, False),
        (goes_on_if_finite, True),
        (asks_of_each, True),
        (asks_for_the_inverse, False),
    ],
)
def test_a_check_passes_with_this_truth(reader: Callable[[Value], object], truth: bool) -> None:
    value = Value(truth)
    reader(value)
    assert value.answers
    assert set(value.answers) == {truth}


@pytest.mark.parametrize(
    "reader", [chooses, compares_with_a_truth, raises_later, returns_early, in_a_sum, asks_beside]
)
def test_what_is_no_check_has_no_answer(reader: Callable[[Value], object]) -> None:
    value = Value(True)
    reader(value)
    assert value.answers
    assert set(value.answers) == {None}


def test_a_check_needs_no_source() -> None:
    names: dict[str, Callable[[Value], object]] = {}
    exec("def reader(value):\n    if not value.all():\n        raise ValueError", names)
    value = Value(True)
    names["reader"](value)
    assert value.answers == [True]
