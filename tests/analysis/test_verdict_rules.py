"""The rules for recordings of one step, with stacks or operators and sizes alone, on small histories."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tb_memplugin.analysis import Finding, advice, block_origins
from tb_memplugin.analysis.advice_rules import RULES, advice_on_steps
from tb_memplugin.analysis.peak_holders import peak_holders
from tb_memplugin.trace import Kind, MemoryTrace, OutOfMemory
from tests.analysis.histories import M, allocator_trace
from tests.step_figures import figures
from tests.traces import trace


def found(history: MemoryTrace, kind: str) -> Finding:
    (finding,) = [one for one in advice(history).findings if one.kind == kind]
    return finding


def why(history: MemoryTrace, kind: str, device: str | None = None) -> str:
    (judgement,) = [one for one in advice(history, device).judgements if one.kind == kind]
    assert judgement.verdict != "found"
    return judgement.why


def stacked(history: MemoryTrace, *stacks: tuple[str, ...], start: tuple[int, ...] = ()) -> MemoryTrace:
    """The history with the n-th stack for its n-th allocation, and rows of them for its start state."""
    rows = np.full(len(history.events), -1, np.int32)
    allocs = np.flatnonzero(history.events.kind == 0)
    rows[allocs] = np.arange(len(allocs)) % len(stacks)
    begin = history.start
    if start:
        begin = replace(begin, stack=np.array(start, np.int32))
    return replace(history, events=replace(history.events, stack=rows), start=begin, stacks=stacks)


CALL_OF_MODULE = "_call_impl torch/nn/modules/module.py:9"

ATTENTION = (
    "alloc 400 q# operator=aten::matmul module=layers.#.attention category=activation",
    "alloc 400 p# operator=aten::softmax module=layers.#.attention category=activation",
    "alloc 100 o# operator=aten::linear module=layers.#.attention category=activation",
)


def layers(*lines: str, count: int) -> list[str]:
    return [line.replace("#", str(layer)) for layer in range(count) for line in lines]


def test_scores_of_attention_are_what_a_fused_kernel_would_not_store() -> None:
    """Two layers keep 2 x 400 of 2 x 900, and 100 are of something else."""
    finding = found(trace("start 100 w", *layers(*ATTENTION, count=2)), "attention_scores")
    assert (finding.bytes, finding.of_bytes) == (1600, 1900)
    assert "keeps 400 B in each of 2 blocks" in finding.title


def test_attention_that_no_fused_kernel_took_is_not_told_to_call_it() -> None:
    history = trace("start 100 w", *layers(*ATTENTION, count=2))
    assert "Call torch.nn.functional.scaled" in found(history, "attention_scores").what_to_do
    math = ("at::_ops::{}::call ??:0", "at::_ops::_scaled_dot_product_attention_math::call ??:0")
    names = ("matmul", "softmax", "linear")
    called = stacked(history, *((math[0].format(name), *math[1:], "attend model.py:3") for name in names))
    assert "ran its math kernel here" in found(called, "attention_scores").what_to_do


def test_a_softmax_over_what_a_layer_computed_is_no_attention() -> None:
    lines = [line.replace("aten::matmul", "aten::linear") for line in layers(*ATTENTION, count=2)]
    assert "No softmax over the product" in why(trace(*lines), "attention_scores")


def test_without_operators_a_softmax_outside_of_modules_is_no_attention() -> None:
    """A loss of distillation divides logits and takes their softmax."""
    stacks = ("loss train.py:3",), ("softmax torch/nn/functional.py:9", "loss train.py:3")
    history = trace("alloc 400 a", "alloc 400 p")
    assert "No softmax over the product" in why(stacked(history, *stacks), "attention_scores")
    in_module = ((*stack, CALL_OF_MODULE) for stack in stacks)
    assert found(stacked(history, *in_module), "attention_scores").bytes == 800


def test_attention_that_returns_its_weights_is_found_without_operators() -> None:
    """nn.MultiheadAttention with need_weights=True, its default: the product has no frame of its own."""
    attention = "multi_head_attention_forward torch/nn/functional.py:6000"
    callers = (attention, CALL_OF_MODULE, "forward model.py:3")
    stacks = callers, ("softmax torch/nn/functional.py:9", *callers)
    history = stacked(trace("alloc 400 a", "alloc 400 p"), *stacks)
    assert found(history, "attention_scores").bytes == 800


def test_without_operators_and_stacks_no_attention_is_judged() -> None:
    assert why(trace("alloc 400 a"), "attention_scores") == (
        "The recording contains neither operators nor stacks."
    )


def test_a_loss_in_float32_keeps_copies_of_the_logits() -> None:
    """Of bf16 logits of 200: the cast, the log-softmax and its gradient, of 400 each; the logits stay."""
    history = trace(
        "start 100 w",
        "alloc 200 logits operator=aten::linear",
        "alloc 400 cast operator=aten::to",
        "free logits",
        "alloc 400 loss operator=aten::log_softmax",
        "free cast",
        "alloc 400 gradient operator=LogSoftmaxBackward0 phase=backward",
    )
    finding = found(history, "loss_logits")
    # with them 100 + 800; without, the logits and the weights are the peak
    assert (finding.bytes, finding.of_bytes) == (900 - 300, 900)
    assert "casts the logits to float32" in finding.title


def test_a_cast_behind_a_log_softmax_is_one_more_copy_of_the_logits() -> None:
    """Of 200 in bf16: the cast for the loss, the log-softmax, and a cast for another term, of 400 each."""
    operators = ("linear", "to", "log_softmax", "to")
    sizes = (200, 400, 400, 400)
    lines = [f"alloc {size} x{at} operator=aten::{operators[at]}" for at, size in enumerate(sizes)]
    finding = found(trace(*lines), "loss_logits")
    assert (finding.bytes, finding.of_bytes) == (1200, 1400)


def masks(*, source: int, copies: int = 3, operator: str = "clone") -> MemoryTrace:
    layers = [f"alloc 65536 m{number} operator=aten::{operator}" for number in range(copies)]
    return trace(f"alloc {source} mask operator=aten::zeros", *layers)


@pytest.mark.parametrize(("operator", "stored"), [("clone", 3), ("repeat", 3), ("tril", 2)])
def test_values_that_are_stored_again_and_again(operator: str, stored: int) -> None:
    """Three copies, each 16 times the mask; of three equal masks, one is needed."""
    finding = found(masks(source=4096, operator=operator), "repeated_values")
    assert (finding.bytes, finding.of_bytes) == (stored * 65536, 3 * 65536 + 4096)


@pytest.mark.parametrize("source", [65536, 3 * 65536, 60000])
def test_a_copy_of_a_tensor_or_of_a_part_of_one_repeats_nothing(source: int) -> None:
    assert "No large tensor" in why(masks(source=source), "repeated_values")


def growing(*, replaced: bool) -> MemoryTrace:
    """Copies of 100, 110, ... 140; each is freed when the next is there, or all at the end."""
    sizes = range(100, 150, 10)
    free = {size: [f"free c{size - 10}"] if replaced and size > 100 else [] for size in sizes}
    return trace(
        *(line for size in sizes for line in (f"alloc {size} c{size} operator=aten::cat", *free[size]))
    )


def test_copies_that_grow_are_needed_once() -> None:
    """130 of the old copy are beside 140 of the new one at the peak."""
    finding = found(growing(replaced=True), "old_copies")
    assert (finding.bytes, finding.of_bytes) == (130, 270)
    assert "No line replaces" in why(growing(replaced=False), "old_copies")


def test_a_tensor_of_the_final_size_is_there_from_the_first_copy_on() -> None:
    """100 beside the second copy. With the final 140 from the first on, 240 of 270 are left."""
    lines = [
        *("alloc 100 c0 operator=aten::cat", "alloc 110 c1 operator=aten::cat", "free c0"),
        *("alloc 100 t operator=aten::relu", "free t"),
    ]
    for number, size in enumerate((120, 130, 140), 2):
        lines += [f"alloc {size} c{number} operator=aten::cat", f"free c{number - 1}"]
    finding = found(trace(*lines), "old_copies")
    assert (finding.bytes, finding.of_bytes) == (30, 270)


@pytest.mark.parametrize(("sizes", "is_found"), [((0, 10, 20, 30, 40), True), ((0, 10, 25, 35, 60), False)])
def test_without_operators_copies_grow_evenly(sizes: tuple[int, ...], is_found: bool) -> None:
    """A line outside of modules replaces 100 and so much; what it frees before is an operand."""
    lines: list[str] = []
    for number, size in enumerate(sizes):
        lines += [f"alloc 5 x{number}", f"free x{number}", f"alloc {100 + size} c{number}"]
        lines += [f"free c{number - 1}"] if number else []
    history = stacked(trace(*lines), ("evaluate eval.py:4",))
    if is_found:
        assert (found(history, "old_copies").bytes, found(history, "old_copies").of_bytes) == (270 - 145, 270)
    else:
        assert "No line replaces" in why(history, "old_copies")


@pytest.mark.parametrize(("runs", "operator"), [(True, "index_select"), (True, "roll"), (False, "roll")])
def test_copies_in_another_order_after_each_forward_are_needed_once(runs: bool, operator: str) -> None:
    """Two of 100 beside the two from before: without these, two and the 10 of a forward are left."""
    lines = [f"alloc 100 {name}0 operator=aten::zeros" for name in "ab"]
    for number in range(1, 5):
        lines += [f"alloc 10 x{number} phase=forward", f"free x{number}"]
        lines += [f"alloc 100 {name}{number} operator=aten::{operator}" for name in "ab"]
        lines += [f"free {name}{number - 1}" for name in "ab"]
    call = ("forward net.py:3", CALL_OF_MODULE) if runs else ("other train.py:4",)
    history = stacked(trace(*lines), (), (), *(call, (), ()) * 4)
    if runs:
        assert (found(history, "old_copies").bytes, found(history, "old_copies").of_bytes) == (190, 400)
    else:
        assert "No line replaces" in why(history, "old_copies")


def looked_up(*, tied: bool) -> MemoryTrace:
    own = ["alloc 800 t operator=MmBackward0 phase=backward", "free t"] if tied else []
    gradient = "alloc 800 g operator=EmbeddingBackward0 phase=backward category=gradient"
    return trace("start 800 w category=parameter", "alloc 8 e operator=aten::embedding", *own, gradient)


def test_a_gradient_of_all_rows_where_few_were_looked_up() -> None:
    finding = found(looked_up(tied=False), "dense_embedding_gradient")
    assert (finding.bytes, finding.of_bytes) == (800, 1608)
    assert "No embedding" in why(looked_up(tied=True), "dense_embedding_gradient")


def test_what_a_cast_makes_twice_as_wide_takes_half_without_it() -> None:
    history = trace(
        "alloc 100 x operator=aten::linear module=a category=activation",
        *(f"alloc 200 {name} operator=aten::{op} module=a" for name, op in (("y", "to"), ("z", "sigmoid"))),
    )
    assert (found(history, "wide_tensors").bytes, found(history, "wide_tensors").of_bytes) == (200, 500)


@pytest.mark.parametrize(("operator", "is_mask"), [("gt", True), ("to", False)])
def test_a_mask_that_is_cast_to_numbers_takes_one_byte_an_element(operator: str, is_mask: bool) -> None:
    """400 in float32 of 100 in bool; images of 100 bytes are cast alike, and have to be."""
    lines = (f"alloc 100 m operator=aten::{operator}", "alloc 400 f operator=aten::_to_copy", "free m")
    history = trace("alloc 400 y operator=aten::tanh", *lines, "alloc 400 z operator=aten::mul")
    if is_mask:
        assert (found(history, "wide_tensors").bytes, found(history, "wide_tensors").of_bytes) == (300, 1200)
    else:
        assert "No float64" in why(history, "wide_tensors")


@pytest.mark.parametrize(
    ("result", "count", "is_copy"), [(10, 4, True), (10, 3, True), (100, 4, False), (10, 2, False)]
)
def test_weights_that_modules_compute_are_copies_of_parameters(
    result: int, count: int, is_copy: bool
) -> None:
    """Four sums of 100 beside weights of 100, and what linear returns of them.

    One may be computed anew before the old one is freed. Not if what linear returns has their size, or if
    there are more sums than that, as of a recurrent network's state.
    """
    weights = layers("alloc 100 w# category=parameter", count=count)
    calls = layers("alloc 100 s# operator=aten::add", f"alloc {result} y# operator=aten::linear", count=4)
    stacks = [("main train.py:1",)] * count + [("forward lora.py:3", CALL_OF_MODULE)] * 8
    history = stacked(trace(*weights, *calls), *stacks)
    if is_copy:
        finding = found(history, "parameter_copies")
        total = 100 * count + 400 + 40
        assert (finding.bytes, finding.of_bytes, finding.subject) == (400, total, "lora.py:3 (forward)")
    else:
        assert "No other line" in why(history, "parameter_copies")


@pytest.mark.parametrize(
    "operator", ["repeat", "repeat_interleave_self_int", "repeat_interleave_self_Tensor"]
)
def test_repeated_values_are_a_problem_by_any_name_of_their_operator(operator: str) -> None:
    history = trace("start 100 w", "alloc 10 a phase=forward", f"alloc 80 r operator=aten::{operator}")
    assert (found(history, "repeated_values").bytes, found(history, "repeated_values").of_bytes) == (80, 190)


def test_one_hot_vectors_and_their_cast_are_not_needed() -> None:
    history = trace(
        "start 100 w", "alloc 80 h operator=aten::one_hot", "alloc 40 f operator=aten::to", "free h"
    )
    assert (found(history, "one_hot_vectors").bytes, found(history, "one_hot_vectors").of_bytes) == (120, 220)


FORWARD = (
    "alloc 100 a# phase=forward module=net category=activation",
    "alloc 50 b# phase=forward module=net",
)


def forwards(scalar: str, *after: str) -> MemoryTrace:
    gradient = "alloc 30 g phase=backward category=gradient"
    return trace("start 400 w", *layers(*FORWARD, scalar, count=3), gradient, *after)


def test_forwards_that_each_have_a_loss_need_not_wait_for_one_backward() -> None:
    """Of 3 x 154, one forward stays; the gradient of 30 is there at the peak in both."""
    finding = found(forwards("alloc 4 l# phase=forward"), "summed_losses")
    assert (finding.bytes, finding.of_bytes) == (2 * 154, 400 + 3 * 154 + 30)
    assert finding.title.startswith("3 forwards")


@pytest.mark.parametrize(("count", "is_sum"), [(5, True), (6, False)])
def test_a_loss_of_what_several_forwards_returned_is_no_sum(count: int, is_sum: bool) -> None:
    """Three forwards are added with three scalars, divided and scaled with two; a sixth is something else."""
    lines = [
        *layers(*FORWARD, "alloc 4 l# phase=forward", count=3),
        *layers("alloc 4 s# operator=x#", count=count),
    ]
    history = trace("start 400 w", *lines, "alloc 30 g phase=backward category=gradient")
    if is_sum:
        assert found(history, "summed_losses").bytes == 2 * 154
    else:
        assert "No backward" in why(history, "summed_losses")


@pytest.mark.parametrize(
    ("scalars", "is_sum"),
    [
        (["aten::add"], True),
        (["aten::mul", "aten::mul", "aten::add"], True),
        (["aten::sub", "aten::log_sigmoid", "aten::neg"], False),
        (["aten::sub", "aten::pow"], False),
        ([""], True),
        (["", ""], False),
    ],
)
def test_a_loss_of_a_pair_needs_both_forwards(scalars: list[str], is_sum: bool) -> None:
    """Without operators, only what takes one scalar is surely a sum of two."""
    joined = [
        f"alloc 4 s{row} operator={name}".removesuffix(" operator=") for row, name in enumerate(scalars)
    ]
    lines = [*layers(*FORWARD, "alloc 4 l# phase=forward operator=aten::mean", count=2), *joined]
    history = trace("start 400 w", *lines, "alloc 30 g phase=backward category=gradient")
    if is_sum:
        assert found(history, "summed_losses").bytes == 154
    else:
        assert "No backward" in why(history, "summed_losses")


@pytest.mark.parametrize("hands_on", ["nothing", "gradients", "saved"])
def test_forwards_that_hand_on_what_they_return_have_one_graph(hands_on: str) -> None:
    """Stages with a loss each. The gradient of a stage's input (70) is born after all that the stage kept.

    A recurrent stage also saves the state that it was given, so its backward frees that. Of 3 x 154 and a
    gradient, three gradients, the weight's of 30 and a loss are left where the stages are apart.
    """
    backward = {
        "nothing": "+g2 -b2 -a2 +g1 -b1 -a1 +g0 -b0 -a0",
        "gradients": "+g2 -b2 -a2 +x2 +g1 -b1 -a1 +x1 +g0 -b0 -a0",
        "saved": "+g2 -b2 -b1 -a2 +g1 -b0 -a1 +g0 -a0",
    }
    lines = [
        f"alloc 70 {event[1:]} phase=backward" if event[0] == "+" else f"free {event[1:]}"
        for event in backward[hands_on].split()
    ]
    of_weight = "alloc 30 w phase=backward category=gradient"
    history = trace(*layers(*FORWARD, "alloc 4 l# phase=forward", count=3), *lines, of_weight)
    if hands_on == "nothing":
        finding = found(history, "summed_losses")
        assert (finding.bytes, finding.of_bytes) == (532 - 244, 532)
    else:
        assert "No backward" in why(history, "summed_losses")


@pytest.mark.parametrize("used", [0, 2])
def test_a_forward_that_its_backward_does_not_free_is_not_summed(used: int) -> None:
    """Like kept losses: of three forwards, two outlive the backward that frees the third."""
    history = forwards("alloc 4 l# phase=forward", f"free a{used}", f"free b{used}")
    assert "No backward" in why(history, "summed_losses")


def test_forwards_of_one_loss_wait_for_its_backward() -> None:
    assert "No backward" in why(forwards("alloc 4 l# phase=forward module=net"), "summed_losses")


@pytest.mark.parametrize("is_sum", [False, True])
def test_losses_of_layers_within_a_call_of_the_model_have_one_graph(is_sum: bool) -> None:
    """Unless something is born outside of the model between them, as an input."""
    loss = "alloc 4 l# phase=forward module=net operator=aten::cross_entropy_loss"
    lines = (*(["alloc 8 x# operator=aten::to"] if is_sum else []), *FORWARD, loss)
    gradient = "alloc 30 g phase=backward category=gradient"
    history = trace("start 400 w", *layers(*lines, count=3), gradient)
    if is_sum:
        assert found(history, "summed_losses").bytes == 2 * 154
    else:
        assert "No backward" in why(history, "summed_losses")


def steps(*, frees: str, other: str = "60 a module=a") -> MemoryTrace:
    """Two steps of two layers, whose gradients an optimizer's zero_grad frees, or of one of them."""
    passed = ("alloc 10 x# phase=forward module=b", "alloc 100 b# phase=backward module=b category=gradient")
    once = f"alloc {other} phase=backward category=gradient"
    return trace("alloc 10 x phase=forward module=b", once, *layers(*passed, frees, count=3))


def test_gradients_that_stay_while_others_are_freed_are_used_by_nothing() -> None:
    finding = found(steps(frees="free b#"), "unused_gradients")
    assert (finding.bytes, finding.evidence[0].bytes, finding.subject) == (60, 60, "a")
    assert "needs gradients that are freed" in why(steps(frees="alloc 1 c#"), "unused_gradients")


def test_gradients_of_a_model_that_is_like_another_may_be_used_by_nothing() -> None:
    """A teacher of the student's class: its gradient has the size of the student's, and no name."""
    assert found(steps(frees="free b#", other="100 a module=b"), "unused_gradients").bytes == 100


def of_activations(*frees: str) -> MemoryTrace:
    """A backward through three activations of 100 and a parameter of 10."""
    gradients = [f"alloc 100 g{number} phase=backward operator=TanhBackward0" for number in range(3)]
    of_weight = "alloc 10 gw phase=backward category=gradient operator=MmBackward0"
    return trace("start 10 w category=parameter", "alloc 100 a phase=forward", *gradients, of_weight, *frees)


def test_gradients_of_activations_that_outlive_their_backward() -> None:
    """10 + 100 + 300 + 10. When the third is born, the first is not needed: 10 + 100 + 200."""
    history = of_activations("free a phase=backward", "free g0", "free g1", "free g2")
    finding = found(history, "unused_gradients")
    assert (finding.bytes, finding.of_bytes) == (420 - 310, 420)
    assert "no parameters" in finding.title


def test_gradients_of_activations_that_a_backward_frees_are_needed() -> None:
    frees = [f"free {name} phase=backward" for name in ("g0", "g1", "g2", "a")]
    assert "Every gradient is freed" in why(of_activations(*frees, "free gw"), "unused_gradients")


def test_the_backward_of_modules_below_all_that_are_trained_counts_too() -> None:
    """At the peak of 220, the gradient of 60 and 30 of its backward are alive, which nothing needs."""
    forward = ("alloc 20 h# phase=forward module=a", "alloc 10 x# phase=forward module=b")
    backward = (
        "alloc 100 b# phase=backward module=b category=gradient",
        "alloc 30 t# phase=backward module=a category=autograd_detail",
    )
    frees = ("free t#", "free h#", "free x#", "free b#")
    once = "alloc 60 a phase=backward module=a category=gradient"
    history = trace(
        *(line.replace("#", "") for line in (*forward, *backward)),
        once,
        *(line.replace("#", "") for line in frees),
        *layers(*forward, *backward, *frees, count=3),
    )
    finding = found(history, "unused_gradients")
    assert (finding.bytes, finding.of_bytes) == (60 + 30, 60 + 20 + 10 + 100 + 30)


def with_reference(*, hands_on: bool = False) -> MemoryTrace:
    """Three passes of a policy (2 x 100, a gradient of 5) and a reference (6 x 100, one of 7 that stays).

    The reference's backward runs first, from 20 to 20, and hands these on to the policy's or does not.
    """
    lines: list[str] = []
    for number in range(3):
        given = ["free s# phase=backward", "alloc 20 u# phase=backward"]
        each = (
            *(f"alloc 100 p{layer}# phase=forward" for layer in range(2)),
            *(f"alloc 100 r{layer}# phase=forward" for layer in range(6)),
            *("alloc 20 t# phase=backward", *(f"free r{layer}# phase=backward" for layer in (5, 4, 3, 2, 1))),
            *("alloc 20 s# phase=backward", "free t# phase=backward", "free r0# phase=backward"),
            "alloc 7 v# phase=backward category=gradient module=reference",
            *(["free v#"] if number else []),
            *(reversed(given) if hands_on else given),
            *("free p1# phase=backward", "alloc 5 g# phase=backward category=gradient module=policy"),
            *("free p0# phase=backward", "free u# phase=backward", "free g#"),
        )
        lines += [line.replace("#", f".{number}") for line in each]
    rows = [{"p": 0, "r": 1}.get(line.split()[-2 if "=" in line.split()[-1] else -1][0], 2) for line in lines]
    history = trace(*lines)
    stacks = [("forward net.py:3", CALL_OF_MODULE, f"step train.py:{row}") for row in range(2)]
    events = replace(history.events, stack=np.array(rows, np.int32))
    return replace(history, events=events, stacks=(*stacks, ("step train.py:9",)))


def test_a_reference_that_is_not_frozen_needs_no_graph() -> None:
    """7 + 200 + 600 + 20. Without a graph, two of the reference's are alive at a time: 200 + 200."""
    finding = found(with_reference(), "unused_gradients")
    assert (finding.bytes, finding.of_bytes) == (827 - 400, 827)


def test_a_model_that_hands_gradients_to_one_that_is_trained_needs_its_graph() -> None:
    """As features in a loss, not frozen: only the gradient of 7 is not needed."""
    assert "by only 7 B" in why(with_reference(hands_on=True), "unused_gradients")


def generator_and_critic(*, detached: bool) -> MemoryTrace:
    """Four turns of a critic (a gradient of 20) and its generator (40), each with an optimizer of its own.

    In the turns of the critic, which sees a larger batch, the generator has a graph if it is not detached.
    """
    lines = list[tuple[str, str]]()
    for turn in range(4):
        owner, other = ("generator", "critic") if turn % 2 else ("critic", "generator")
        size, of_other, score = (40, 20, 50) if turn % 2 else (20, 40, 150)
        hidden, after, unused = (
            [("alloc 300 hidden phase=forward module=generator", "model")],
            [
                (f"alloc {of_other} other phase=backward module={other} category=gradient", "backward"),
                ("free hidden phase=backward", "backward"),
            ],
            [("free other", f"zero_{other}")],
        )
        if detached and not turn % 2:
            hidden, after, unused = [], [], []
        lines += [
            *hidden,
            ("alloc 10 output phase=forward module=generator", "model"),
            (f"alloc {score} score phase=forward module=critic", "model"),
            (f"alloc {size} own phase=backward module={owner} category=gradient", "backward"),
            ("free score phase=backward", "backward"),
            *after,
            ("free output", "main"),
            (f"alloc {size} state{turn} phase=optimizer category=optimizer_state", f"step_{owner}"),
            ("free own", f"zero_{owner}"),
            *unused,
        ]
        lines += [(f"free state{turn}", f"step_{owner}")] if turn > 1 else []
    functions = sorted({function for _, function in lines})
    history = trace(*(line for line, _ in lines))
    rows = np.array([functions.index(function) for _, function in lines], np.int32)
    stacks = tuple((f"{function} train.py:{row}",) for row, function in enumerate(functions))
    return replace(history, events=replace(history.events, stack=rows), stacks=stacks)


def test_a_critic_needs_no_graph_of_its_generator() -> None:
    """Its turn: 60 of state, 300 + 10 + 150 and 20. Without the 300, the highest is the generator's."""
    finding = found(generator_and_critic(detached=False), "unused_gradients")
    assert (finding.bytes, finding.of_bytes) == (540 - (60 + 300 + 10 + 50 + 40), 540)
    detached = why(generator_and_critic(detached=True), "unused_gradients")
    assert detached == "Gradients that no optimizer uses raise the peak by only 0 B."


SIZES = (10, 20, 30, 40)
PARAMETERS = [f"alloc {size} w{size} category=parameter" for size in SIZES]
MODEL, COPY = ("to model.py:5",), ("deepcopy train.py:9",)


@pytest.mark.parametrize(
    ("numerator", "denominator", "detail"),
    [(1, 1, "in the same dtype"), (2, 1, "at twice the bytes"), (1, 2, "at half the bytes")],
)
def test_parameters_in_memory_twice(numerator: int, denominator: int, detail: str) -> None:
    sizes = [size * numerator // denominator for size in SIZES]
    history = trace(*PARAMETERS, *(f"alloc {size} c{size}" for size in sizes))
    finding = found(stacked(history, *[MODEL] * 4, *[COPY] * 4), "parameter_copies")
    assert finding.bytes == sum(sizes)
    assert finding.subject == "train.py:9 (deepcopy)"
    assert finding.evidence[0].detail == f"4 blocks {detail}"


def test_a_copy_that_is_made_in_the_line_of_the_parameters() -> None:
    history = trace(*PARAMETERS, *(f"alloc {size} c{size}" for size in SIZES))
    assert found(stacked(history, MODEL), "parameter_copies").bytes == sum(SIZES)


def test_all_lines_that_copy_count_and_a_line_may_copy_several_times() -> None:
    """A clone of the parameters, and two of an optimizer's state, which has their sizes."""
    state = [f"alloc {size} s{size} category=optimizer_state" for size in SIZES]
    clones = [f"alloc {size} {name}{size} operator=aten::clone" for name in "abc" for size in SIZES]
    stacks = [*[MODEL] * 4, *[("step adam.py:3",)] * 4, *[COPY] * 4, *[("save train.py:20",)] * 8]
    finding = found(stacked(trace(*PARAMETERS, *state, *clones), *stacks), "parameter_copies")
    assert (finding.bytes, finding.subject) == (3 * sum(SIZES), "train.py:20 (save)")


def test_two_models_of_one_size_are_one_model_and_its_copy() -> None:
    other = [line.replace(" w", " v") for line in PARAMETERS]
    history = stacked(trace(*PARAMETERS, *other), *[MODEL] * 4, *[COPY] * 4)
    assert found(history, "parameter_copies").bytes == sum(SIZES)


@pytest.mark.parametrize("sizes", [(10, 20, 30, 41), (10, 20, 30)])
def test_other_sizes_are_no_copy_of_the_parameters(sizes: tuple[int, ...]) -> None:
    history = trace(*PARAMETERS, *(f"alloc {size} c{size}" for size in sizes))
    of_copies = [COPY] * len(sizes)
    assert "No other line" in why(stacked(history, *[MODEL] * 4, *of_copies), "parameter_copies")


def test_optimizer_state_of_unknown_dtype_has_at_least_two_bytes_per_element() -> None:
    history = trace("start 100 w category=parameter", "start 100 m category=optimizer_state", "alloc 9 a")
    assert found(history, "optimizer_state").bytes == 50


def test_optimizer_state_beside_parameters_of_half_the_width_is_float32() -> None:
    history = trace("start 100 w category=parameter", "start 200 m category=optimizer_state", "alloc 9 a")
    finding = found(history, "optimizer_state")
    assert finding.bytes == 150
    assert "twice the bytes per element of the parameters" in finding.title


def test_gradients_that_a_recording_of_forward_alone_keeps() -> None:
    history = trace(
        "start 100 w category=parameter",
        "start 100 g category=gradient",
        "alloc 300 a phase=forward category=activation",
    )
    finding = found(history, "kept_gradients")
    assert (finding.level, finding.bytes, finding.of_bytes) == ("option", 100, 500)
    assert "unless you accumulate gradients" in finding.price


def accumulated(*between: str) -> MemoryTrace:
    """Two forwards of 500 at their highest, each before a backward; a gradient of 100 outlives the second."""
    forward = (
        "alloc 300 a# phase=forward category=activation",
        "alloc 200 t# phase=forward category=activation",
        "free t#",
        "alloc 100 g# phase=backward category=gradient",
        "free a#",
    )
    first, second = ([line.replace("#", number) for line in forward] for number in "12")
    end = ("free g1", "alloc 1 x phase=backward")
    return trace("start 100 w category=parameter", *first, *between, *second, "free g2", *end)


STEPPED = ("alloc 7 t phase=optimizer", "free t")


def test_the_second_gradient_of_a_size_is_needed_again_when_backward_allocates_the_second() -> None:
    """At the peak, 100 + 200 + 600 + 100, backward adds to one of two gradients of 100."""
    gradients = [f"start 100 g{number} category=gradient" for number in "12"]
    forward = [f"alloc 300 a{number} phase=forward category=activation" for number in "12"]
    backward = layers("alloc 100 b# phase=backward", "free b#", "free a#", count=3)[3:]
    history = trace("start 100 w category=parameter", *gradients, *forward, *backward)
    assert (found(history, "kept_gradients").bytes, found(history, "kept_gradients").of_bytes) == (100, 1000)


def test_gradients_that_are_summed_up_over_two_backwards_are_needed() -> None:
    assert "by only 0 B" in why(accumulated(), "kept_gradients")


def test_gradients_that_are_alive_in_a_forward_after_an_optimizer_step_are_kept() -> None:
    assert found(accumulated(*STEPPED), "kept_gradients").bytes == 100


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


@pytest.mark.parametrize(("loss", "wide"), [(8, 808), (4, 0)])
def test_a_loss_of_eight_bytes_is_of_a_model_in_float64(loss: int, wide: int) -> None:
    """Its backward casts nothing, so everything takes half."""
    history = trace(
        "start 400 w category=parameter",
        "alloc 400 a phase=forward category=activation operator=aten::linear",
        f"alloc {loss} g phase=backward operator=aten::ones_like",
    )
    if wide:
        assert found(history, "wide_tensors").bytes == wide // 2
    else:
        assert "No float64" in why(history, "wide_tensors")


def test_a_product_with_float64_makes_a_loss_wide_up_to_the_cast_of_its_gradient() -> None:
    """Of 300, 800 and 8 bytes, the cast gradient says that the 800 are in float64."""
    history = trace(
        "start 300 w category=parameter",
        "alloc 800 p phase=forward operator=aten::mul",
        "alloc 8 g phase=backward operator=aten::ones_like",
        "free p",
        "alloc 400 c phase=backward operator=aten::_to_copy",
    )
    assert (found(history, "wide_tensors").bytes, found(history, "wide_tensors").of_bytes) == (400, 1108)


@pytest.mark.parametrize(
    ("parameters", "backward", "is_found"), [(1, True, True), (2, True, False), (1, False, False)]
)
def test_state_of_an_optimizer_that_another_replaced(parameters: int, backward: bool, is_found: bool) -> None:
    """Two blocks of state by one line: of one parameter after the other, of the same, or as loaded."""
    start = [f"start 100 w{n} category=parameter" for n in range(parameters)]
    state = [f"alloc 100 m{n} category=optimizer_state phase=optimizer" for n in range(2)]
    state[1:1] = ["alloc 1 g phase=backward"] * backward
    history = trace(*start, *state)
    history = stacked(history, ("_init_group torch/optim/adam.py:166", "train train.py:9"))
    problems = [one for one in advice(history).findings if one.level == "problem"]
    assert [(one.kind, one.bytes) for one in problems] == [("optimizer_state", 100)] * is_found


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


def test_results_that_a_list_keeps_pile_up() -> None:
    """Four results of 400 beside 100 inside. Freed when the next is born, one of 400 and 100 are left."""
    lines = [
        line.replace("#", str(number))
        for number in range(4)
        for line in ("alloc 100 a# phase=forward", "alloc 400 r# phase=forward", "free a#")
    ]
    history = trace(*lines, *(f"free r{number}" for number in range(4)))
    stacks = ("forward net.py:3",), ("forward net.py:9",)
    finding = found(stacked(history, *stacks), "previous_result")
    assert (finding.bytes, finding.of_bytes, finding.evidence[0].bytes) == (1200, 1700, 1200)
    trained = stacked(trace(*lines, "alloc 5 g phase=backward category=gradient"), *stacks)
    assert "No result of an earlier forward" in why(trained, "previous_result")


def test_results_that_a_list_keeps_pile_up_beside_what_the_running_forward_needs() -> None:
    """At the peak three results of 400 and 600 + 500 inside; who frees these is not known."""
    each = (
        *("alloc 600 a# phase=forward", "alloc 500 b# phase=forward", "free a#"),
        *("alloc 50 c# phase=forward", "free b#", "alloc 400 r# phase=forward", "free c#"),
    )
    stacks = ("forward net.py:3",), ("forward net.py:5",), ("forward net.py:7",), ("forward net.py:9",)
    finding = found(stacked(trace(*layers(*each, count=4)), *stacks), "previous_result")
    assert (finding.bytes, finding.of_bytes, finding.subject) == (800, 2300, "net.py:9 (forward)")


def test_the_output_of_a_layer_is_alive_while_the_next_of_its_class_runs() -> None:
    """A convolution and a ReLU, twice: the second one's input is freed with what it returns."""
    each = "alloc 400 c# module=l#.conv phase=forward", "alloc 400 x# module=l#.relu phase=forward"
    first, second = layers(*each, count=2)[:2], layers(*each, count=2)[2:]
    lines = trace(*first, "free c0", *second, "free c1", "free x0")
    history = stacked(lines, ("forward net.py:3",), ("forward net.py:9",))
    assert "No result of an earlier forward" in why(history, "previous_result")


def hooked(*, layers_: int = 3, sites: int = 4, forwards: int = 3) -> MemoryTrace:
    """Forwards of layers that allocate 100 in each of some lines; hooks free the old 100 for the new one."""
    lines: list[str] = []
    for forward in range(forwards):
        for number in range(layers_ * sites):
            lines.append(f"alloc 100 a{forward}.{number} phase=forward")
            lines += [f"free a{forward - 1}.{number}"] if forward else []
    return stacked(trace("start 50 w", *lines), *((f"forward net.py:{line}",) for line in range(sites)))


def test_hooks_that_store_outputs_keep_them_until_the_next_forward() -> None:
    """12 of 100 and a new one, beside 50. Freed when the third after each is born, three are left."""
    finding = found(hooked(), "previous_result")
    assert (finding.bytes, finding.of_bytes) == (1000, 1350)
    assert "Remove forward hooks" in finding.what_to_do


def test_states_are_kept_by_no_hook() -> None:
    """Two of each layer: the next forward reads them."""
    assert "No result of an earlier forward" in why(hooked(sites=2), "previous_result")


def test_variables_of_a_loop_over_layers_are_kept_by_no_hook() -> None:
    """Four of 100, each until the next of its line; only that of the last line may be a result."""
    assert found(hooked(layers_=1), "previous_result").bytes == 100


def test_the_lines_of_the_next_layer_are_no_next_forward() -> None:
    """Each of three layers returns 400 beside its own 400 and 600, by a line that made the 400, too."""
    each = (
        *("alloc 400 n# module=l# phase=forward", "alloc 600 u# module=l#.up phase=forward"),
        *("alloc 400 x# module=l# phase=forward", "free u#", "free n#"),
    )
    stacks = ("forward net.py:3",), ("forward net.py:5",), ("forward net.py:3",)
    history = stacked(trace(*layers(*each, count=3)), *stacks)
    assert "No result of an earlier forward" in why(history, "previous_result")


def test_results_that_outlive_their_backward_pile_up() -> None:
    """Three of 400, with 100 that each backward frees and its 5; the last of 400 is needed."""
    each = (
        "alloc 400 r# phase=forward",
        "alloc 100 a# phase=forward",
        "alloc 5 t# phase=backward",
        "free t# phase=backward",
        "free a# phase=backward",
    )
    history = trace(*layers(*each, count=3), *(f"free r{number}" for number in range(3)))
    stacks = ("forward net.py:9",), ("forward net.py:3",), ("step train.py:2",)
    finding = found(stacked(history, *stacks), "previous_result")
    assert (finding.bytes, finding.of_bytes, finding.subject) == (800, 1305, "net.py:9 (forward)")


def test_what_an_error_frees_was_no_result_of_an_earlier_forward() -> None:
    """Two results of one line, both alive when a request fails, and freed soon after."""
    history = replace(results(kept=True), ooms=(OutOfMemory(5, 1, 0),))
    assert "No result of an earlier forward" in why(history, "previous_result")


REQUEST = ("alloc 400 c#", "alloc 100 a# phase=forward", "free a#")
SERVED = ("serve server.py:4",), ("forward net.py:3", CALL_OF_MODULE, "serve server.py:5")


def test_what_is_allocated_for_each_forward_and_kept_piles_up() -> None:
    """Four caches of 400 beside 100 inside. Freed before the next request, 500 are left."""
    history = trace(*layers(*REQUEST, count=4), *(f"free c{number}" for number in range(4)))
    finding = found(stacked(history, *SERVED), "previous_result")
    assert (finding.bytes, finding.of_bytes, finding.subject) == (1200, 1700, "server.py:4 (serve)")


def test_a_queue_that_stays_as_long_is_no_pile() -> None:
    """Three requests at a time: the oldest ends before the next begins."""
    lines = layers(*REQUEST, count=3)
    for number in range(3, 8):
        lines += [f"free c{number - 3}", *(line.replace("#", str(number)) for line in REQUEST)]
    assert "No result of an earlier forward" in why(stacked(trace(*lines), *SERVED), "previous_result")


def test_caches_that_are_freed_in_turn_are_no_pile() -> None:
    """Three layers get a cache with a prompt, and free it when they have another, in their next call."""
    turns = layers("alloc 300 d#", "free c#", "alloc 100 b# phase=forward", "free b#", count=3)
    history = trace(*layers(*REQUEST, count=3), *turns)
    assert "No result of an earlier forward" in why(stacked(history, *SERVED), "previous_result")


def test_caches_that_serve_many_forwards_are_no_pile() -> None:
    """Three layers get a cache in their first call, and use it in ten more."""
    calls = [
        line for number in range(30) for line in (f"alloc 100 b{number} phase=forward", f"free b{number}")
    ]
    history = trace(*layers(*REQUEST, count=3), *calls, *(f"free c{number}" for number in range(3)))
    stacks = SERVED * 3 + SERVED[1:] * 30
    assert "No result of an earlier forward" in why(stacked(history, *stacks), "previous_result")


@pytest.mark.parametrize(("again", "copies"), [(0, 0), (1, 0), (9, 0), (0, 9)])
def test_outputs_of_all_layers_that_a_forward_returned_pile_up(again: int, copies: int) -> None:
    """Four of 400, and 100 inside. Freed by the next layer, 500 are left.

    Not if the layers run again, or copies take the place of each. What the last layer returned may be of
    another line.
    """
    each = ("alloc 100 a# phase=forward", "alloc 400 r# phase=forward", "free a#")
    lines = layers(*each, count=4)
    lines += layers("alloc 100 b# phase=forward", "free b#", count=again)
    history = trace(*lines, *layers(*(f"alloc 1 n#{copy}" for copy in range(copies)), "free r#", count=4))
    inner, outer = (
        (CALL_OF_MODULE, "forward model.py:7", CALL_OF_MODULE, "main main.py:1"),
        ("main main.py:2",),
    )
    history = stacked(history, ("forward net.py:3", *inner), ("forward net.py:9", *inner), inner[1:], outer)
    row = history.events.stack.copy()
    row[history.events.kind == Kind.ALLOC] = [0, 1] * 4 + [0] * again + [3] * 4 * copies
    row[-4 - 4 * copies :] = 3
    history = replace(history, events=replace(history.events, stack=row))
    if again > 1 or copies:
        assert "No result of an earlier forward" in why(history, "previous_result")
    else:
        finding = found(history, "previous_result")
        assert (finding.bytes, finding.of_bytes, finding.subject) == (1200, 1700, "net.py:9 (forward)")


def results(*, kept: bool) -> MemoryTrace:
    """Three forwards of 100 inside and 400 returned, which lives until the next is returned, or not."""
    lines: list[str] = []
    for number in range(3):
        lines += [
            f"alloc 100 a{number} phase=forward",
            f"alloc 400 r{number} phase=forward",
            f"free a{number}",
        ]
        if not kept:
            lines.append(f"free r{number}")
        elif number:
            lines.append(f"free r{number - 1}")
    return stacked(trace(*lines), ("forward net.py:3",), ("forward net.py:9",))


def test_what_a_forward_returned_is_alive_while_the_next_runs() -> None:
    """The old 400 beside 100 + 400; freed before the forward, 500 are left."""
    finding = found(results(kept=True), "previous_result")
    assert (finding.bytes, finding.of_bytes, finding.subject) == (400, 900, "net.py:9 (forward)")


def test_what_saves_most_comes_first_whether_it_is_a_problem_or_an_option() -> None:
    """At the peak, 600 of a sort are beside the old 400, the new 400 and 100."""
    each = ("alloc 100 a# phase=forward", "alloc 400 r# phase=forward")
    sort = "alloc 600 t# phase=forward category=temporary operator=aten::sort"
    lines = [line for again in ("", "free r0") for line in (*each, sort, "free t#", "free a#", again) if line]
    numbered = [line.replace("#", str(at // 5)) for at, line in enumerate(lines)]
    history = stacked(trace(*numbered), ("forward net.py:3",), ("forward net.py:9",), ("forward net.py:12",))
    assert [(one.kind, one.level, one.bytes, one.of_bytes) for one in advice(history).findings] == [
        ("large_temporary", "option", 600, 1500),
        ("previous_result", "problem", 400, 1500),
    ]


def pairs(*, size: int = 4000, tensors: int = 1, smaller: int = 20) -> MemoryTrace:
    """Layers of 10 each, and a few tensors of all pairs of their rows, in forward and once in backward."""
    lines = [f"alloc 10 a{number} phase=forward" for number in range(smaller)]
    lines += [f"alloc {size} p{number} phase=forward" for number in range(tensors)]
    lines.append(f"alloc {size} g phase=backward operator=aten::pow_backward")
    stacks = [("forward net.py:3",)] * smaller + [("pairs net.py:9",)] * tensors + [("(backward of Pow)",)]
    return stacked(trace(*lines), *stacks)


def test_a_tensor_of_all_pairs_is_many_times_as_large_as_all_others() -> None:
    """20 x 10, and 4,000 in forward and in backward."""
    finding = found(pairs(), "outsized_tensor")
    assert (finding.bytes, finding.of_bytes, finding.subject) == (8000, 8200, "net.py:9 (pairs)")
    assert "400 times as large as all others" in finding.title


@pytest.mark.parametrize(
    "history", [pairs(size=159), pairs(tensors=5), pairs(smaller=3)], ids=["small", "many", "usual"]
)
def test_other_large_tensors_are_as_they_should_be(history: MemoryTrace) -> None:
    assert "No few tensors" in why(history, "outsized_tensor")


def test_scalars_make_no_tensor_outsized() -> None:
    """One large tensor among four; 20 values of a log do not count."""
    sizes = [4] * 20 + [10, 10, 10, 4000]
    history = trace(*(f"alloc {size} a{at} phase=forward" for at, size in enumerate(sizes)))
    assert "No few tensors" in why(stacked(history, *[("forward net.py:3",)] * 24), "outsized_tensor")


def test_results_that_are_freed_before_the_next_forward_are_as_they_should_be() -> None:
    assert "No result of an earlier forward" in why(results(kept=False), "previous_result")


CALL = "forward model.py:20"


def loop(*, layers: int, of: str = "phase=forward category=activation") -> MemoryTrace:
    """Each layer keeps 300 inside and 100 as its output; backward frees the last layer first."""
    born = [
        line.replace("#", str(at))
        for at in range(layers)
        for line in (
            f"alloc 300 a# {of}",
            f"alloc 100 b# {of}",
        )
    ]
    freed = [f"free {name}{at}" for at in reversed(range(layers)) for name in "ba"]
    inner = [("forward layer.py:5", CALL), ("forward layer.py:6", CALL)]
    return stacked(trace(*born, *freed, "alloc 5 g phase=backward"), *inner * layers, ())


@pytest.mark.parametrize(
    "of", ["phase=forward category=activation", "phase=backward category=recomputed"], ids=["kept", "at once"]
)
def test_calls_of_a_line_are_recomputed_where_modules_are_not_known(of: str) -> None:
    """The last layer runs while the outputs of the other three are kept: 3 x 100 + 400 of 4 x 400.

    So it is where one checkpoint around all layers recomputes them at once.
    """
    finding = found(loop(layers=4, of=of), "checkpointing")
    assert (finding.bytes, finding.of_bytes) == (1600 - 700, 1600)
    assert finding.subject == "model.py:20 (forward)"
    assert "4 calls" in finding.title


def test_what_outlives_its_backward_is_not_kept_for_it() -> None:
    """300 of each call are freed after the optimizer's step, as variables of the loop are."""
    kept = (
        "alloc 300 a# phase=forward category=activation",
        "alloc 100 b# phase=forward category=activation",
    )
    backward = ("alloc 5 g phase=backward", *(f"free b{at}" for at in range(4)))
    after = ("alloc 7 m phase=optimizer", *(f"free a{at}" for at in range(4)))
    inner = [("forward layer.py:5", CALL), ("forward layer.py:6", CALL)]
    history = stacked(trace(*layers(*kept, count=4), *backward, *after), *inner * 4, (), ())
    assert "by at most 0 B" in why(history, "checkpointing")


def test_what_a_line_calls_is_named_where_stacks_name_it() -> None:
    finding = found(
        loop(layers=4, of="phase=forward category=activation module=layers.#.mlp"), "checkpointing"
    )
    assert finding.title.startswith("Recompute layers.*.mlp, which model.py:20 (forward) calls, in backward")


@pytest.mark.parametrize(
    "passed_on",
    [
        "wrapped_func /lib/transformers/utils/deprecation.py:173",
        "forward /lib/torch/distributed/fsdp/fully_sharded_data_parallel.py:857",
    ],
)
def test_a_line_of_a_library_that_only_passes_calls_on_is_not_to_be_recomputed(passed_on: str) -> None:
    history = loop(layers=4)
    stacks = tuple((*stack[:1], passed_on, *stack[1:]) for stack in history.stacks)
    assert found(replace(history, stacks=stacks), "checkpointing").subject == "model.py:20 (forward)"


def test_without_a_backward_nothing_is_recomputed_in_it() -> None:
    kept = [f"alloc {size} x{size} phase=forward category=activation" for size in (300, 100)]
    history = stacked(trace(*kept), ("forward layer.py:5", CALL), ("forward layer.py:6", CALL))
    assert "has no backward" in why(history, "checkpointing")


def test_a_workspace_from_an_earlier_backward_is_no_backward() -> None:
    kept = layers("alloc 100 x# phase=forward category=activation", count=4)
    called = [(f"forward layer.py:{line}", CALL, "forward model.py:20") for line in (5, 6)]
    backward = ("torch::autograd::generated::AddmmBackward0::apply ??:0",)
    history = stacked(trace("start 50 w", *kept), *called, *called, backward, start=(4,))
    assert "has no backward" in why(history, "checkpointing")


def test_with_stacks_a_peak_without_activations_is_judged() -> None:
    history = trace("alloc 90 w category=parameter", "alloc 5 g phase=backward category=gradient")
    assert "by at most 0 B" in why(stacked(history, MODEL), "checkpointing")


def test_one_call_has_nothing_to_recompute() -> None:
    assert "by at most 0 B" in why(loop(layers=1), "checkpointing")


def test_free_memory_beside_new_segments_is_told_by_what_keeps_it() -> None:
    """100M free beside a block of 4M; 60M of another stream; 50M beside 50M. Then 200M need a new segment."""
    history = allocator_trace(
        *("held 0M 104M", "live 0M 4M"),
        *("held 200M 80M stream=1", "live 200M 20M stream=1"),
        *("held 400M 100M", "live 400M 50M"),
        *("segment_alloc 600M 200M", "alloc 600M 200M"),
    )
    finding = found(history, "fragmentation")
    assert [(row.what, row.bytes) for row in finding.evidence[:4]] == [
        ("pinned", 100 * M),
        ("streams", 60 * M),
        ("splits", 50 * M),
        ("cached segments", 0),
    ]
    assert (finding.bytes, finding.of_bytes) == (210 * M, 484 * M)


def test_free_memory_that_costs_no_reserve_is_no_finding() -> None:
    """The 96M beside the small block are used when the reserve is at its highest."""
    history = allocator_trace(
        *("held 0M 100M", "live 0M 4M"),
        *("segment_alloc 600M 200M", "alloc 600M 200M", "alloc 4M 96M"),
    )
    assert "the highest reserve is 0 B above the highest use" in why(history, "fragmentation")


FULL = ("held 0M 100M", "live 0M 40M", "alloc 40M 60M", "oom 10M 30M")


def test_a_failed_request_says_what_is_missing_and_what_would_have_been_enough() -> None:
    """30M are requested and 10M are free on the device, so 20M are missing."""
    finding = found(allocator_trace(*FULL), "failed_request")
    assert (finding.bytes, finding.evidence[0].bytes) == (20 * M, 30 * M)
    changes = {row.what: (row.bytes, row.detail.partition(":")[0]) for row in finding.evidence[1:]}
    assert changes["a device with more memory"] == (20 * M, "enough")
    assert changes["expandable_segments:True"][1] == "not enough"
    # the request and the block of the window shrink, the block of before it does not: 20 of 90
    assert changes["a batch smaller by 22.2 %"][0] == 20 * M


def test_a_request_that_a_limit_refused_says_so_and_not_that_nothing_was_missing() -> None:
    """900M are free; the limit is not known: a new segment of 30M is the most that is missing."""
    finding = found(allocator_trace(*FULL[:3], "oom 900M 30M"), "failed_request")
    assert (finding.bytes, finding.measure) == (30 * M, "missing at most")
    assert "which had 900.0 MiB free: a limit on the process refused it" in finding.title
    changes = {
        row.what.partition(" (")[0]: (row.bytes, row.detail.partition(":")[0]) for row in finding.evidence
    }
    assert changes["a higher limit"] == (30 * M, "enough")
    assert changes["expandable_segments:True"][1] == "not enough"
    assert "a device with more memory" not in changes


IN_PIECES = (
    *("segment_alloc 0M 40M", "alloc 0M 40M", "segment_alloc 100M 20M", "alloc 100M 20M"),
    *("segment_alloc 200M 40M", "alloc 200M 40M", "free_requested 0M 40M", "free_completed 0M 40M"),
    *("free_requested 200M 40M", "free_completed 200M 40M"),
    *("alloc 0M 4M", "alloc 200M 4M"),
)
"""36M and 36M are free, each in a segment of its own."""


@pytest.mark.parametrize(
    ("free", "missing"), [(2, 24), (54, 6)], ids=["in the largest block", "for a segment of its own"]
)
def test_what_is_missing_in_one_piece_is_never_added_up_from_two(free: int, missing: int) -> None:
    """60M are requested: a segment lacks 6M where the device has 54M, the largest free block lacks 24M."""
    finding = found(allocator_trace(*IN_PIECES, f"oom {free}M 60M"), "failed_request")
    assert finding.bytes == missing * M
    assert finding.measure == "missing in one piece"


def test_a_failed_request_that_expandable_segments_would_have_served() -> None:
    finding = found(allocator_trace(*IN_PIECES, "oom 2M 60M"), "failed_request")
    row = next(row for row in finding.evidence if row.what == "expandable_segments:True")
    assert row.detail.startswith("enough: simulated")
    assert finding.measure == "missing in one piece"


def test_a_recording_without_a_failed_request_has_none() -> None:
    assert why(allocator_trace("held 0M 100M", "live 0M 4M"), "failed_request") == (
        "No request failed while it was recorded."
    )


def test_a_device_with_more_than_its_share_of_the_same_code() -> None:
    history = trace("alloc 900 a device=cuda:0", "alloc 300 b device=cuda:1")
    finding = found(stacked(history, ("forward model.py:7",)), "uneven_devices")
    assert (finding.device, finding.bytes, finding.of_bytes) == ("cuda:0", 300, 900)


def test_devices_that_run_different_code_are_not_compared() -> None:
    history = trace("alloc 900 a device=cuda:0", "alloc 300 b device=cuda:1")
    stacks = ("forward encoder.py:7",), ("forward decoder.py:7",)
    assert why(stacked(history, *stacks), "uneven_devices", "cuda:0") == "The devices run different code."


SAME_LAYERS = ((30, "h.0.mlp"), (20, "h.1.mlp"), (40, "head"))


def test_the_holders_of_a_peak_sum_to_it() -> None:
    """The model's own memory is one holder for each category; the rest has lines."""
    history = trace(
        *("alloc 50 w1 category=parameter", "alloc 30 w2 category=parameter"),
        *("alloc 100 a category=activation", "alloc 20 b category=activation", "alloc 3 c"),
    )
    lines = MODEL, COPY, ("forward a.py:1",), ("forward a.py:1",), ("forward b.py:2",)
    peak = peak_holders(stacked(history, *lines), 0)
    assert [(holder.name, holder.bytes, holder.blocks) for holder in peak.holders] == [
        ("a.py:1 (forward)", 120, 2),
        ("parameter", 80, 2),
        ("b.py:2 (forward)", 3, 1),
    ]
    assert sum(holder.bytes for holder in peak.holders) == peak.bytes == 203
    assert dict(peak.categories) == {"activation": 120, "parameter": 80, "unknown": 3}


def test_of_a_line_that_runs_a_model_of_a_library_the_layers_are_the_holders() -> None:
    """As of `trainer.train()`; of a model of the user's own, its lines."""
    call = "_call_impl /env/lib/python3.12/site-packages/torch/nn/modules/module.py:9"
    library = ("forward /env/lib/python3.12/site-packages/transformers/a.py:7", call, "<module> train.py:3")
    own = ("forward model.py:7", call, "<module> train.py:3")
    lines = [f"alloc {size} {name} module={name} phase=forward" for size, name in SAME_LAYERS]
    peak = peak_holders(stacked(trace(*lines), library, library, own), 0)
    assert [(holder.name, holder.bytes, holder.blocks) for holder in peak.holders] == [
        ("h.*", 50, 2),
        ("model.py:7 (forward)", 40, 1),
    ]


def test_repeated_layers_are_one_holder() -> None:
    lines = [f"alloc {size} {name} module={name} phase=forward" for size, name in SAME_LAYERS]
    peak = peak_holders(trace(*lines), 0)
    assert [(holder.name, holder.bytes, holder.blocks) for holder in peak.holders] == [
        ("h.*.mlp", 50, 2),
        ("head", 40, 1),
    ]


def watched(peaks: Any) -> tuple[str, int]:
    """The verdict of growth on figures whose steps leave half of their peak, and its bytes per step."""
    advised = advice_on_steps(figures(peaks))
    (judgement,) = [one for one in advised.judgements if one.kind == "growth"]
    return judgement.verdict, sum(finding.bytes for finding in advised.findings)


def test_watched_steps_that_leave_2_mib_more_each_time() -> None:
    assert watched(2 * (100 * M + 2 * M * np.arange(1000))) == ("found", 2 * M)


@pytest.mark.parametrize(
    ("peaks", "verdict"),
    [
        (np.full(1000, 100 * M), "fine"),
        (100 * M + 2 * M * np.minimum(np.arange(1000), 500), "fine"),
        (100 * M + 2 * M * (np.arange(1000) % 50), "fine"),
        (100 * M + 2 * M * np.arange(20), "not judged"),
    ],
    ids=["level", "a queue that is full", "cycles", "too few steps"],
)
def test_watched_steps_that_show_no_growth(peaks: np.ndarray, verdict: str) -> None:
    assert watched(peaks) == (verdict, 0)


def test_figures_alone_judge_no_other_rule() -> None:
    verdicts = {one.kind: one.verdict for one in advice_on_steps(figures([M] * 100)).judgements}
    assert verdicts == dict.fromkeys(RULES, "not judged") | {"growth": "fine"}


def test_what_several_rules_need_is_computed_once_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    step_blocks = block_origins._step_blocks

    def counted(judged: block_origins.Judged) -> block_origins.StepBlocks:
        read.append(judged.device)
        return step_blocks(judged)

    monkeypatch.setattr(block_origins, "_step_blocks", counted)
    advice(allocator_trace("live 16M 600", "live 32M 600 device=1", "alloc 17M 512"))
    assert read == [0, 1]
