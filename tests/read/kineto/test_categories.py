"""Categories of what a Kineto trace allocates, by phases and lifetimes."""

from __future__ import annotations

from tb_memplugin.trace import Category, Phase
from tests.read.kineto.written import annotation, categories, loaded, memory, node, operator, ran


def test_a_step_without_stacks_has_activations_gradients_and_optimizer_state() -> None:
    trace = loaded(
        operator("mm", 1, 4, 5),
        memory("2 100 8 8"),  # saved for backward
        node("MmBackward0", 10, 20, 5),
        ran("MmBackward0", 11, 19, args={"Sequence number": 5, "Fwd thread id": 1}),
        memory("12 200 4 12"),  # lives into the optimizer
        memory("13 300 2 14"),
        memory("14 300 -2 12"),  # freed while the node's function runs
        memory("19 400 1 13"),
        memory("21 100 -8 5"),
        node("NegBackward0", 22, 25, 4),
        memory("23 400 -1 4"),  # made by one node for the next
        annotation("Optimizer.step#AdamW.step", 30, 40),
        memory("31 500 16 20"),
        memory("33 600 3 23"),
        memory("35 600 -3 20"),
        memory("50 200 -4 16"),
    )
    assert categories(trace) == [
        Category.ACTIVATION,
        Category.GRADIENT,
        Category.TEMPORARY,
        Category.AUTOGRAD_DETAIL,
        Category.OPTIMIZER_STATE,
        Category.TEMPORARY,
    ]


def test_a_forward_whose_graph_never_runs_is_one_by_the_numbers_that_rise() -> None:
    trace = loaded(
        operator("mul", 1, 4, 5), memory("2 100 8 8"), operator("mul", 6, 9, 6), memory("7 200 8 16")
    )
    assert trace.events.phase.tolist() == [Phase.FORWARD, Phase.OTHER]
    assert categories(trace) == [Category.ACTIVATION, Category.UNKNOWN]


def test_operators_of_networks_are_a_forward_without_gradients_too() -> None:
    trace = loaded(
        ran("aten::conv2d", 1, 4), memory("2 100 8 8"), ran("aten::zeros", 6, 9), memory("7 200 8 16")
    )
    assert trace.events.phase.tolist() == [Phase.FORWARD, Phase.OTHER]
    assert categories(trace) == [Category.ACTIVATION, Category.UNKNOWN]


def test_a_free_on_another_thread_does_not_make_a_block_temporary() -> None:
    trace = loaded(
        operator("mul", 1, 9, 5),
        memory("2 100 8 8"),
        memory("4 100 -8 0", thread=2),
        operator("mul", 10, 12, 6),
    )
    assert categories(trace) == [Category.ACTIVATION]


def test_an_optimizer_in_a_hook_of_backward_is_the_optimizer() -> None:
    trace = loaded(
        node("torch::autograd::AccumulateGrad", 10, 40, -1),
        annotation("Optimizer.step#SGD.step", 20, 30),
        memory("21 100 8 8"),
        memory("22 100 -8 0"),
    )
    assert trace.events.phase.tolist() == [Phase.OPTIMIZER, Phase.OPTIMIZER]
    assert categories(trace) == [Category.TEMPORARY]
