"""Copies of weights are told from other tensors by all of their sizes, or all of their names."""

import numpy as np
import pytest

from tb_memplugin.read.categories import Born
from tb_memplugin.record.storages import Sighting
from tb_memplugin.record.weight_copies import Weights, held_copies, made_copies, references
from tb_memplugin.trace import Category, Phase, Reason, Spans
from tb_memplugin.trace.labels import ALIVE_BEFORE

ORDER = ["0.weight", "0.bias", "0.mean", "1.weight", "1.bias"]
SIZES = {"0.weight": 80, "0.bias": 8, "0.mean": 4, "1.weight": 160, "1.bias": 16}
PARAMETERS = [name for name in ORDER if name != "0.mean"]


def seen(size, label, category=Category.UNKNOWN, module=-1, address=0):
    return Sighting(0, "cpu", address, size, category, module, label)


def model():
    rows = []
    for name, size in SIZES.items():
        category = Category.BUFFER if name == "0.mean" else Category.PARAMETER
        rows.append(seen(size, name, category, module=int(name[0])))
    return rows


def held(*others):
    start = held_copies([*model(), *others], ORDER)
    assert start[: len(ORDER)] == model()
    return [(one.category.key, one.label, one.module) for one in start[len(ORDER) :]]


def test_variables_that_end_in_the_names_of_all_parameters_hold_copies():
    names = [seen(SIZES[name], f"ema.shadow['{name}']") for name in reversed(PARAMETERS)]
    assert held(*names, seen(80, "replay")) == [
        ("parameter_copy", "copy of 1.bias, ema.shadow['1.bias']", 1),
        ("parameter_copy", "copy of 1.weight, ema.shadow['1.weight']", 1),
        ("parameter_copy", "copy of 0.bias, ema.shadow['0.bias']", 0),
        ("parameter_copy", "copy of 0.weight, ema.shadow['0.weight']", 0),
        ("unknown", "replay", -1),
    ]


def test_buffers_beside_all_parameters_are_copies_too_and_alone_they_are_not():
    names = [seen(SIZES[name], f"averaged.{name}") for name in ORDER[::-1]]
    assert {category for category, *_ in held(*names)} == {"parameter_copy"}
    assert held(seen(4, "averaged.0.mean")) == [("unknown", "averaged.0.mean", -1)]


def test_a_copy_that_no_variable_names_has_the_name_of_its_parameter_alone():
    unnamed = [seen(SIZES[name], ALIVE_BEFORE) for name in PARAMETERS]
    assert [label for _, label, _ in held(*unnamed)] == [f"copy of {name}" for name in PARAMETERS]


def test_a_module_with_the_same_parameters_is_a_copy():
    names = [seen(SIZES[name], f"averaged.module.{name}", Category.PARAMETER) for name in PARAMETERS]
    assert {category for category, *_ in held(*names)} == {"parameter_copy"}


def test_without_names_the_order_of_the_sizes_tells():
    assert held(seen(5, ""), *(seen(SIZES[name], "") for name in ORDER)) == [
        ("unknown", "", -1),
        *(("parameter_copy", f"copy of {name}", int(name[0])) for name in ORDER),
    ]


@pytest.mark.parametrize(
    "others",
    [
        [seen(SIZES[name], f"other.{name}") for name in PARAMETERS[::-1][:-1]],  # one is missing
        [seen(SIZES[name] + 8, f"other.{name}") for name in PARAMETERS],  # other sizes
        [seen(SIZES[name], f"group 0 parameter {number}", Category.PARAMETER)
         for number, name in enumerate(PARAMETERS)],  # trained by an optimizer
        [seen(SIZES[name], "", Category.GRADIENT) for name in PARAMETERS],
    ],
    ids=["missing", "sizes", "trained", "gradients"],
)  # fmt: skip
def test_these_are_no_copies(others):
    assert "parameter_copy" not in {category for category, *_ in held(*others)}


PHASES = Spans(
    np.array([100, 200, 300]),
    np.array([200, 250, 350]),
    np.array([Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER], np.int32),
    np.zeros(3, np.int32),
    np.array([Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER], np.uint8),
)


def made(sizes, at=400, operator=0, phase=Phase.OTHER, reason=Reason.NO_RULE):
    count = len(sizes)
    born = Born(
        time_ns=at + np.arange(count),
        freed_ns=np.full(count, 10_000),
        device=np.zeros(count, np.uint8),
        bytes=np.array(sizes),
        phase=np.full(count, phase, np.uint8),
        operator=np.full(count, operator, np.int32),
        operator_end_ns=np.zeros(count, np.int64),
        recomputing=np.zeros(count, bool),
    )
    found = made_copies(
        born,
        np.full(count, reason, np.uint8),
        PHASES,
        ["aten::clone", "aten::mm"],
        references(model(), ORDER),
    )
    return dict(zip(found.block, found.names, strict=True))


def test_clones_in_the_order_of_a_state_dict_are_copies():
    assert made([7, *SIZES.values(), 9]) == dict(enumerate(ORDER, start=1))


def test_clones_of_the_parameters_alone_are_copies_twice():
    sizes = [SIZES[name] for name in PARAMETERS]
    assert made([*sizes, *sizes]) == dict(enumerate([*PARAMETERS, *PARAMETERS]))


@pytest.mark.parametrize(
    "changed",
    [
        {"operator": 1},
        {"phase": Phase.OPTIMIZER},
        {"at": 260},  # between backward and the optimizer's step: of gradients, perhaps
        {"reason": Reason.HELD},
        {"reason": Reason.FREED_BEFORE_PHASE},
    ],
    ids=str,
)
def test_other_blocks_are_no_copies(changed):
    assert made(list(SIZES.values()), **changed) == {}


def test_a_model_of_two_parameters_says_too_little():
    weights = Weights(("weight", "bias"), (0, 0), np.array([80, 8]))
    assert weights.runs_in(np.array([80, 8, 80, 8])).tolist() == []
