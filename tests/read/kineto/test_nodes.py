"""Modules of what autograd allocates, by the sequence numbers of its nodes."""

from __future__ import annotations

from tb_memplugin.trace import Category, Phase
from tests.read.kineto.written import (
    NODE,
    categories,
    function,
    loaded,
    memory,
    module,
    node,
    operator,
    owners,
    ran,
)

TWO_LAYERS = (
    module("Net_0", 0, 30),
    module("Linear_0", 1, 10),
    operator("addmm", 2, 9, 5),
    module("Linear_1", 11, 20),
    operator("t", 12, 13, 6),
    operator("addmm", 14, 19, 6),  # the last with the number makes the node: `t` made none
)


def test_what_a_node_allocates_belongs_to_the_module_whose_operator_made_it() -> None:
    trace = loaded(
        *TWO_LAYERS,
        node("AddmmBackward0", 40, 44, 6),
        memory("41 100 8 8"),
        node("AddmmBackward0", 50, 54, 5),
        memory("51 200 8 16"),
    )
    assert owners(trace) == ["Linear_1", "Linear_0"]
    assert trace.events.module_confidence.tolist() == [98, 98]
    assert [(note.code, note.bytes) for note in trace.notes if "inferred" in note.code] == [
        ("node_modules_inferred", 16)
    ]


def test_a_gradient_is_accumulated_for_the_node_before() -> None:
    accumulate = ran(NODE + "torch::autograd::AccumulateGrad", 45, 49)
    trace = loaded(*TWO_LAYERS, node("AddmmBackward0", 40, 44, 6), accumulate, memory("46 100 8 8"))
    assert owners(trace) == ["Linear_1"]
    assert categories(trace) == [Category.GRADIENT]


def test_a_node_without_a_number_has_that_of_its_own_function() -> None:
    hooked = ran(NODE + "AddmmBackward0", 40, 49)
    own = ran("AddmmBackward0", 43, 48, args={"Sequence number": 6, "Fwd thread id": 1})
    trace = loaded(*TWO_LAYERS, hooked, own, memory("44 100 8 8"))
    assert owners(trace) == ["Linear_1"]


def test_a_node_whose_operator_is_not_in_the_trace_has_no_module() -> None:
    trace = loaded(*TWO_LAYERS, node("MulBackward0", 40, 44, 3), memory("41 100 8 8"))
    assert owners(trace) == ["outside:MulBackward0"]
    assert trace.events.module_confidence.tolist() == [100]


def test_each_thread_numbers_its_nodes() -> None:
    trace = loaded(
        *TWO_LAYERS,
        operator("mul", 3, 4, 5, thread=2),
        operator("mul", 5, 6, 7, thread=2),
        *(node("AddmmBackward0", 40 + at, 40 + at, number, thread=3) for at, number in ((1, 6), (3, 5))),
        node("MulBackward0", 50, 52, 7, thread=3, made_on=2),
        memory("51 100 8 8", thread=3),
        node("MulBackward0", 60, 62, 5, thread=3, made_on=2),
        memory("61 200 8 16", thread=3),
    )
    assert owners(trace) == ["outside:mul", "outside:mul"]


def test_a_module_within_a_node_runs_again_and_owns_what_it_allocates() -> None:
    trace = loaded(
        *TWO_LAYERS,
        node("AddmmBackward0", 40, 60, 6),
        ran("AddmmBackward0", 41, 59, args={"Sequence number": 6, "Fwd thread id": 1}),
        module("Linear_0", 42, 50),
        operator("addmm", 43, 49, 9),
        memory("44 100 8 8"),
        memory("52 200 4 12"),
        memory("70 100 -8 4"),
    )
    assert owners(trace) == ["Linear_0", "Linear_1"]
    assert categories(trace) == [Category.RECOMPUTED, Category.GRADIENT]
    assert trace.events.phase[0] == Phase.BACKWARD


def test_without_modules_operators_with_gradients_on_run_again_within_a_node() -> None:
    trace = loaded(
        operator("mul", 1, 2, 5),
        node("MulBackward0", 40, 60, 5),
        ran("MulBackward0", 41, 59, args={"Sequence number": 5, "Fwd thread id": 1}),
        operator("mul", 43, 49, 9),
        memory("44 100 8 8"),
        memory("70 100 -8 0"),
    )
    assert categories(trace) == [Category.RECOMPUTED]
    assert trace.operators[int(trace.events.operator[0])] == "aten::mul"


def test_two_classes_of_one_name_are_two_modules() -> None:
    trace = loaded(
        module("Linear_0", 1, 20),
        function("adapters.py(7): forward", 2, 19),
        module("Linear_0", 3, 9),
        function("torch/nn/linear.py(9): forward", 4, 8),
        memory("5 100 8 8"),
        memory("12 200 8 16"),
    )
    assert owners(trace) == ["Linear_0 (torch/nn/linear.py(9))", "Linear_0"]
    inner = trace.modules[int(trace.events.module[0])]
    assert (inner.class_name, trace.modules[inner.parent].key) == ("Linear", "Linear_0")
