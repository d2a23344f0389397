"""The rule `unused_graph` on small histories."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tb_memplugin.trace import Kind, MemoryTrace, OutOfMemory
from tests.analysis.advice_rules.findings import CALL_OF_MODULE, STEPPED, found, layers, stacked, why
from tests.traces import trace


def forward(name: str, count: int, size: int) -> list[str]:
    operators = ("linear", "gelu", "layer_norm", "add")
    return [
        f"alloc {size} {name}{n} phase=forward category=activation operator=aten::{operators[n % 4]}"
        for n in range(count)
    ]


def freed(name: str, count: int) -> list[str]:
    return [f"free {name}{n}" for n in range(count)]


def graph(*, count: int, end: tuple[str, ...] = ()) -> MemoryTrace:
    return trace(*forward("a", count, 100), *freed("a", count), *end)


def test_activations_that_are_freed_together_without_a_backward() -> None:
    """Each block is needed until three more are allocated: then three are alive."""
    finding = found(graph(count=12), "unused_graph")
    assert (finding.level, finding.bytes, finding.of_bytes) == ("problem", 1200 - 300, 1200)


def test_a_training_uses_its_graph() -> None:
    end = ("alloc 5 g phase=backward category=gradient",)
    assert "has a backward" in why(graph(count=12, end=end), "unused_graph")


def freed_in(history: MemoryTrace, *stack: str) -> MemoryTrace:
    """The history whose frees have a stack, and no other event has one."""
    rows = np.where(history.events.kind == Kind.FREE_COMPLETED, 0, -1).astype(np.int32)
    return replace(history, events=replace(history.events, stack=rows), stacks=(stack,))


TRAINED = ("alloc 5 g phase=backward category=gradient", "free g")


@pytest.mark.parametrize(
    ("stack", "is_found"),
    [(("validate train.py:9",), True), (("_call_impl module.py:7", "validate train.py:9"), False)],
)
def test_a_validation_beside_a_training_keeps_a_graph_that_is_freed_outside_of_its_calls(
    stack: tuple[str, ...], is_found: bool
) -> None:
    history = freed_in(graph(count=12, end=TRAINED), *stack)
    if is_found:
        assert found(history, "unused_graph").bytes == 1200 - 300
    else:
        assert "has a backward" in why(history, "unused_graph")


def test_what_is_freed_right_after_its_backward_costs_no_more_than_that() -> None:
    """Without what the backward used, only its 5 bytes are less."""
    history = trace(*forward("a", 12, 100), *TRAINED, *freed("a", 12))
    assert "only 5 B lower" in why(freed_in(history, "train train.py:9"), "unused_graph")


def test_a_graph_that_outlives_its_backward_is_kept() -> None:
    """It is alive while the next forward allocates the same."""
    first, second = (forward(name, 12, 100) for name in "ab")
    history = trace(*first, *TRAINED, *second, *freed("a", 12), *TRAINED, *freed("b", 12))
    finding = found(freed_in(history, "train train.py:9"), "unused_graph")
    assert (finding.bytes, finding.of_bytes) == (1200, 2400)
    assert "after their backward" in finding.title


@pytest.mark.parametrize("again", [False, True])
def test_a_backward_ran_although_other_losses_and_the_next_forward_repeat_its_operators(again: bool) -> None:
    """One node for each of the graph's operators, also of the loss that two blocks are computed for.

    Without a kept graph, the peak is before the backward: 12 blocks and two of losses.
    """
    names = ("Linear", "Gelu", "LayerNorm", "Add", "MseLoss")
    nodes = [f"alloc 5 # phase=backward operator=autograd::{name}Backward0" for name in names]
    backward = [line for node in nodes for line in (node, "free #")]
    losses = [f"alloc 9 {name} phase=forward operator=aten::mse_loss" for name in ("la", "other")]
    following = forward("b", 12, 1000) if again else ["alloc 12000 b phase=forward operator=aten::rand"]
    history = trace(
        *forward("a", 12, 1000), *losses, *backward, "free other", *following, *freed("a", 12), "free la"
    )
    finding = found(freed_in(history, "train train.py:9"), "unused_graph")
    assert (finding.bytes, finding.of_bytes) == (24_009 - 12_018, 24_009)
    assert "after their backward" in finding.title


VALIDATED = ("alloc 10 i#", *forward("a#", 4, 100), "alloc 4 l# phase=forward")


OUTSIDE, INSIDE = ("validate train.py:9",), ("forward net.py:3", CALL_OF_MODULE, "validate train.py:9")


def validated(*before: str, failed: bool, inside: tuple[str, ...] = ()) -> MemoryTrace:
    """Three forwards of 10, 4 x 100 and 4, and one more block outside, which fails, or is there."""
    each = (*VALIDATED[:-1], *inside, VALIDATED[-1])
    lines = [line.replace("operator", "module=net operator") for line in layers(*each, count=3)]
    history = trace(*before, *lines, "alloc 1 x", *[f"free a{number}2" for number in range(3)])
    in_call = [module >= 0 and history.modules[module].is_module for module in history.events.module]
    events = replace(history.events, stack=np.array(in_call, np.int32))
    ooms = (OutOfMemory(len(events) - 4, 1, 0),) * failed
    return replace(history, events=events, stacks=(OUTSIDE, INSIDE), ooms=ooms)


def test_forwards_that_keep_their_graphs_until_a_request_fails() -> None:
    """Of 3 x 414 and 1: three blocks of a graph are needed, three losses and the first input."""
    finding = found(validated(failed=True), "unused_graph")
    assert (finding.bytes, finding.of_bytes) == (1243 - (300 + 12 + 10), 1243)
    assert finding.title.startswith("3 forwards")
    assert "at most 0 B" in why(validated(failed=True), "checkpointing")
    (row,) = [row for row in found(validated(failed=True), "failed_request").evidence if "graph" in row.what]
    assert row.bytes == finding.bytes


def test_forwards_that_keep_little_of_what_they_allocate_are_requests_with_caches() -> None:
    """Each keeps 400 of 400, 4 and 700."""
    history = validated(failed=True, inside=("alloc 700 t module=net phase=forward", "free t"))
    assert "A request failed" in why(history, "unused_graph")


def test_forwards_of_which_a_backward_may_need_several_keep_no_graph_for_nothing() -> None:
    """An earlier backward ran over two, and freed what they kept. Each of these has a loss, too."""
    summed = [line.replace("operator", "module=net operator") for line in layers(*VALIDATED, count=2)]
    summed = [line.replace(" a", " b").replace(" i", " j").replace(" l", " k") for line in summed]
    backward = "alloc 5 g phase=backward category=gradient"
    names = ("k1", "b13", "b12", "b11", "b10", "k0", "b03", "b02", "b01", "b00")
    history = validated(*summed, backward, *(f"free {name} phase=backward" for name in names), failed=True)
    assert "has a backward" in why(history, "unused_graph")
    assert found(history, "summed_losses").bytes == 2 * 404


def test_graphs_of_prompts_that_grow_are_one_finding() -> None:
    """Two graphs are alive at once, of 12 x 110 and 12 x 120; needed are three blocks, beside which is z."""
    prompts = [forward("a", 12, 100), forward("b", 12, 110), freed("a", 12), forward("c", 12, 120)]
    prompts += [freed("b", 12), ["alloc 1 z"], freed("c", 12)]
    history = trace(*(line for lines in prompts for line in lines))
    finding = found(history, "unused_graph")
    assert (finding.bytes, finding.of_bytes) == (2760 - 361, 2760)


def test_a_graph_beside_a_backward_of_another_was_never_used() -> None:
    """A teacher of 12 and a student of 4 blocks, and one block of backward for each of the student's.

    Of the teacher three blocks are needed, and 4 x 50 and 5 of the student and its backward.
    """
    nodes = ("Linear", "Gelu", "LayerNorm", "Add")
    backward = [
        line
        for name in nodes
        for line in (f"alloc 5 {name} phase=backward operator=autograd::{name}Backward0", f"free {name}")
    ]
    history = trace(
        *forward("t", 12, 100), *forward("s", 4, 50), *backward, *freed("s", 4), *STEPPED, *freed("t", 12)
    )
    finding = found(freed_in(history, "train train.py:9"), "unused_graph")
    assert (finding.bytes, finding.of_bytes) == (1405 - 505, 1405)
    assert "never runs" in finding.title


def test_results_in_a_list_are_no_graph() -> None:
    lines = [f"alloc 100 a{number} operator=aten::linear" for number in range(12)]
    history = trace(*lines, *(f"free a{number}" for number in range(12)))
    assert "No activations" in why(history, "unused_graph")


def test_what_one_line_keeps_in_every_layer_is_no_graph() -> None:
    lines = [f"alloc 100 a{number} module=layers.{number} phase=forward" for number in range(12)]
    history = trace(*lines, *(f"free a{number}" for number in range(12)))
    assert "No activations" in why(stacked(history, ("<lambda> hooks.py:3",)), "unused_graph")


def test_layers_of_a_library_that_one_line_calls_are_a_graph() -> None:
    """Of 2 x (100 + 80 + 60 + 40), three blocks in a row are needed at a time: 100 + 80 + 60."""
    each = [f"alloc {size} a{size}# phase=forward" for size in (100, 80, 60, 40)]
    lines = ("linear.py:5", "normalization.py:6", "activation.py:7", "dropout.py:8")
    frees = layers(*(f"free a{size}#" for size in (100, 80, 60, 40)), count=2)
    history = trace(*layers(*each, count=2), *frees)
    stacks = ((f"forward torch/nn/modules/{line}", CALL_OF_MODULE, "evaluate eval.py:3") for line in lines)
    finding = found(stacked(history, *stacks), "unused_graph")
    assert (finding.bytes, finding.of_bytes) == (320, 560)


def test_what_a_loss_reads_of_a_graph_is_needed() -> None:
    """The same beside a difference of 100, as to the last of features: that and the last four are left."""
    each = [f"alloc {size} a{size}# phase=forward" for size in (100, 80, 60, 40)]
    frees = layers(*(f"free a{size}#" for size in (100, 80, 60, 40)), count=2)
    history = trace(*layers(*each, count=2), "alloc 100 d phase=forward", *frees)
    lines = ("linear.py:5", "normalization.py:6", "activation.py:7", "dropout.py:8")
    inside = [(f"forward torch/nn/modules/{line}", CALL_OF_MODULE, "evaluate eval.py:3") for line in lines]
    finding = found(stacked(history, *inside * 2, ("evaluate eval.py:4",)), "unused_graph")
    assert (finding.bytes, finding.of_bytes) == (660 - 380, 660)
