"""What routes declare is what the tab is typed with, what the page says, and what they answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypedDict

import pytest

from frontend import contract
from tb_memplugin.trace.tables import Bool, Int64
from tests.server.contract import differences


class Place(TypedDict):
    """A place."""

    at: tuple[int, int]
    """Two numbers."""
    kind: Literal["here", "there"]
    """Which."""


class Thing(Place, total=False):
    """A thing."""

    parts: list[Place | None]
    """Its parts."""
    sizes: dict[str, float]
    shares: dict[str, float]
    """By name."""


@dataclass
class Row:
    """A row."""

    sizes: Int64
    """Bytes, or None."""


@dataclass
class Table(Row):
    """A table."""

    exact: Bool | None
    shares: tuple[tuple[str, float], ...]
    rows: tuple[Row, ...]
    """Its parts."""


HERE = {"at": [1, 2], "kind": "here"}


@pytest.mark.parametrize(
    "value", [HERE, {**HERE, "parts": [None, HERE]}, {**HERE, "sizes": {"a": 1, "b": 0.5}, "shares": {}}]
)
def test_what_is_declared_is_accepted(value):
    assert list(differences(value, Thing)) == []


@pytest.mark.parametrize(
    ("value", "difference"),
    [
        ({"kind": "here"}, "answer lacks at"),
        ({**HERE, "more": 1}, "answer has more"),
        ({**HERE, "at": [1]}, "answer.at is [1]"),
        ({**HERE, "at": [1, True]}, "answer.at[] is True"),
        ({**HERE, "kind": "nowhere"}, "answer.kind is 'nowhere'"),
        ({**HERE, "parts": [{"at": [1, 2]}]}, "answer.parts[] lacks kind"),
        ({**HERE, "sizes": {"a": None}}, "answer.sizes['a'] is None"),
        ([], "answer is []"),
    ],
)
def test_anything_else_is_a_difference(value, difference):
    assert list(differences(value, Thing)) == [difference]


def test_a_type_in_typescript():
    assert contract.in_typescript(list[int | None]) == "(number | null)[]"
    assert contract.in_typescript(list[tuple[int, float]]) == "[number, number][]"
    assert contract.in_typescript(dict[str, Thing] | None) == "Record<string, Thing> | null"
    assert contract.in_typescript(Literal["a", "b"]) == '"a" | "b"'
    assert contract.in_typescript(Int64 | None) == "number[] | null"
    assert contract.in_typescript(tuple[Row, ...]) == "Row[]"


def test_a_type_in_words():
    assert contract.in_words(list[int | None]) == "list of (int or null)"
    assert contract.in_words(dict[str, Thing] | None) == "object of `Thing` or null"
    assert contract.in_words(Bool) == "list of bool"
    assert contract.in_words(tuple[tuple[str, float], ...]) == "object of number"


def test_fields_share_the_text_below_them():
    thing = contract.object_of(Thing)
    assert (thing.about, thing.bases) == ("A thing.", (Place,))
    assert [(field.name, field.is_required, field.about) for field in thing.fields] == [
        ("parts", False, "Its parts."),
        ("sizes", False, "By name."),
        ("shares", False, "By name."),
    ]


def test_a_dataclass_is_an_object_of_its_fields():
    row, table = contract.object_of(Row), contract.object_of(Table)
    assert [(field.name, field.about) for field in row.fields] == [("sizes", "Bytes, or null.")]
    assert (table.bases, [field.name for field in table.fields]) == ((Row,), ["exact", "shares", "rows"])
    value = {"sizes": [1, 2], "exact": [True], "shares": {"a": 0.5}, "rows": [{"sizes": []}]}
    assert list(differences(value, Table)) == []
    assert sorted(differences({**value, "exact": [1], "rows": [{}]}, Table)) == [
        "answer.exact[] is 1",
        "answer.rows[] lacks sizes",
    ]


def test_the_tab_is_typed_with_what_routes_declare():
    assert contract.TYPESCRIPT.read_text("utf-8") == contract.typescript(), "run: make contract"


def test_the_page_says_what_routes_declare():
    text = contract.PAGE.read_text("utf-8")
    assert text == contract.page(text), "run: make contract"
