"""A snapshot of the running program has the names of the program's own models and optimizers."""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.nn.modules import activation, container, linear, module

from tb_memplugin.read.snapshot.trace import trace_from_snapshot
from tb_memplugin.record.own_names import _with_sightings, model_modules, with_own_names
from tb_memplugin.record.storages import Sighting
from tb_memplugin.trace import Category, MemoryTrace, Module, Reason
from tests.read.layers.stacks import Frame, modules, snapshot_of

MAIN: Frame = ("<module>", "train.py", 3)
CALL: Frame = ("_call_impl", module.__file__, 1779)


def _forward(kind: type[nn.Module], file: str | None) -> Frame:
    return ("forward", file or "", kind.forward.__code__.co_firstlineno + 1)


LOOP = _forward(nn.Sequential, container.__file__)
LINEAR = _forward(nn.Linear, linear.__file__)
RELU = _forward(nn.ReLU, activation.__file__)
TANH = _forward(nn.Tanh, activation.__file__)
INNER = [MAIN, CALL, LOOP, CALL, LOOP, CALL]


def named(model: nn.Module, *stacks: list[Frame]) -> list[str]:
    trace = trace_from_snapshot(snapshot_of(*((512, stack) for stack in stacks)), "test")
    return modules(with_own_names(trace, {"": model}, ()))


def test_sequentials_in_a_sequential_have_the_names_of_the_model() -> None:
    """All their stacks are alike. A ReLU in place allocates nothing, so its call is not seen."""
    model = nn.Sequential(
        nn.Sequential(nn.Linear(1, 1), nn.ReLU(inplace=True), nn.Linear(1, 1)),
        nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)),
    )
    calls = [[*INNER, LINEAR]] * 4
    names = ["0.0", "0.2", "1.0", "1.1"]
    assert named(model, *calls) == names
    assert named(model, *calls[:3]) == names[:3], "memory ran out in the third"


def test_what_may_be_one_of_two_modules_is_not_named_by_the_model() -> None:
    """The call may be of either tanh; the other allocated nothing that is still known."""
    model = nn.Sequential(nn.Sequential(nn.Tanh(), nn.Tanh(), nn.Linear(1, 1), nn.Tanh()))
    names = named(model, [*INNER, TANH], [*INNER, LINEAR])
    assert names[1] == "0.2"
    assert "?" in names[0]


def test_a_call_of_a_class_that_the_model_has_not_keeps_what_its_stack_says() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(1, 1)))
    assert "?" in named(model, [*INNER, RELU])[0]


def test_a_shared_module_has_its_first_name() -> None:
    shared = nn.Linear(1, 1)
    model = nn.Sequential(nn.Sequential(shared, nn.Tanh()), nn.Sequential(shared))
    assert named(model, [*INNER, LINEAR], [*INNER, TANH], [*INNER, LINEAR]) == ["0.0", "0.1", "0.0"]
    (root,) = model_modules({"": model})
    assert root.children["1"].children["0"] is root.children["0"].children["0"]


def test_the_only_module_of_a_class_is_named_whatever_the_text_says() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.ModuleDict({"mask": nn.Linear(1, 1)})
            self.body = nn.Sequential(nn.Tanh())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.heads["mask"](self.body(x))

    own: Frame = ("forward", __file__, Model.forward.__code__.co_firstlineno + 1)
    model = Model()
    assert named(model, [MAIN, CALL, own, CALL, LINEAR]) == ["heads.mask"]


def sighted(trace: MemoryTrace, *seen: tuple[int, Category, str]) -> MemoryTrace:
    now = time.time_ns()
    sightings = [Sighting(now, "cuda:0", address, 8, category, 1, label) for address, category, label in seen]
    return _with_sightings(trace, sightings, [Module("", -1, "Net"), Module("head.up", 0, "Linear")])


def test_blocks_of_the_programs_tensors_are_known_by_address() -> None:
    """The first is that of the weight, the second of its gradient; the third is not known."""
    trace = trace_from_snapshot(snapshot_of((8, [MAIN]), (16, [MAIN]), (32, [MAIN])), "test")
    first = int(trace.events.address[0])
    known = sighted(
        trace,
        (first, Category.PARAMETER, "head.up.weight"),
        (first + 8, Category.GRADIENT, "head.up.weight (gradient)"),
        (1, Category.BUFFER, "elsewhere"),
    )
    assert modules(known) == ["head.up", "head.up", "(not named)"]
    assert known.events.module_confidence.tolist() == [100, 100, trace.events.module_confidence[2]]
    assert known.events.category[:2].tolist() == [Category.PARAMETER, Category.GRADIENT]
    assert known.events.reason[:2].tolist() == [Reason.HELD] * 2
    assert [known.labels[row] for row in known.events.label[:2]] == [
        "head.up.weight",
        "head.up.weight (gradient)",
    ]
    assert [each.key for each in known.modules] == ["(not named)", "", "head", "head.up"]
    assert [each.parent for each in known.modules] == [-1, -1, 1, 2]
    assert known.allocations.category.tolist() == known.events.category.tolist()
    assert int(known.allocations.bytes.sum()) == 56
