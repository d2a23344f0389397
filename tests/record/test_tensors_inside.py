"""Tensors are found in any object, and none of its code runs."""

from collections import OrderedDict, UserDict, deque, namedtuple
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tb_memplugin.record import tensors_inside
from tb_memplugin.record.tensors_inside import tensors_in

ONE, OTHER = torch.zeros(1), torch.zeros(2)


class Slots:
    __slots__ = ("left", "never_assigned")

    def __init__(self, left):
        self.left = left


class Inherited(Slots):
    pass


@dataclass
class Preconditioner:
    factors: list[torch.Tensor] = field(default_factory=lambda: [ONE])
    inverse: Slots = field(default_factory=lambda: Slots({"q": OTHER}))


Pair = namedtuple("Pair", "left right")


class List(list):
    def __init__(self, *values):
        super().__init__(values)
        self.beside = OTHER


def names_of(found):
    return [{id(ONE): "one", id(OTHER): "other"}.get(id(tensor), tensor) for tensor in found]


@pytest.mark.parametrize(
    "holder",
    [
        [ONE, OTHER],
        (ONE, {"a": [OTHER]}),
        OrderedDict(a=ONE, b=OTHER),
        UserDict(a=ONE, b=OTHER),
        deque([ONE, OTHER]),
        Pair(ONE, OTHER),
        Preconditioner(),
        List(ONE),
        [Slots(ONE), Inherited(OTHER)],
        SimpleNamespace(a=ONE, b={OTHER}),
    ],
    ids=lambda holder: type(holder).__name__,
)
def test_tensors_are_found_in(holder):
    assert names_of(tensors_in(holder)) == ["one", "other"]


def test_a_tensor_is_itself():
    assert names_of(tensors_in(ONE)) == ["one"]


def test_a_cycle_ends_and_each_tensor_comes_once():
    holder: dict[str, object] = {"a": ONE, "again": ONE}
    holder["self"] = holder
    assert names_of(tensors_in(holder)) == ["one"]


def test_modules_and_optimizers_keep_what_is_theirs():
    model = nn.Linear(1, 1)
    assert list(tensors_in([model, torch.optim.SGD(model.parameters(), lr=1), nn.Linear])) == []


class Hostile:
    """Ends the test where anything of it is called; lies about its class."""

    def __init__(self):
        object.__setattr__(self, "kept", ONE)

    def __getattribute__(self, name):
        raise SystemExit(name)

    def __getattr__(self, name):
        raise SystemExit(name)

    __eq__ = __hash__ = __iter__ = __len__ = __bool__ = __getattr__  # type: ignore[assignment]


class Liar(dict):
    __class__ = torch.Tensor  # type: ignore[assignment]

    def values(self):
        raise SystemExit

    def __iter__(self):
        raise SystemExit


class WithProperty:
    @property
    def value(self):
        raise SystemExit

    @property
    def __dict__(self):  # type: ignore[override]
        raise SystemExit


def test_no_code_of_an_object_runs():
    assert names_of(tensors_in([Hostile(), Liar(a=OTHER), WithProperty()])) == ["one", "other"]


def test_a_search_ends_after_a_number_of_objects(monkeypatch):
    monkeypatch.setattr(tensors_inside, "MOST_OBJECTS", 10)
    lists: list[list[object]] = [[] for _ in range(9)]
    assert names_of(tensors_in([*lists, ONE])) == ["one"]
    assert names_of(tensors_in([*lists, [], ONE])) == []


def test_what_lies_too_deep_is_not_looked_for():
    nested: object = ONE
    for _ in range(tensors_inside.DEEPEST + 2):
        nested = [nested]
    assert list(tensors_in(nested)) == []
