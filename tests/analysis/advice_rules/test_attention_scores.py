"""The rule `attention_scores` on small histories."""

from __future__ import annotations

from tests.analysis.advice_rules.findings import CALL_OF_MODULE, found, layers, stacked, why
from tests.traces import trace

ATTENTION = (
    "alloc 400 q# operator=aten::matmul module=layers.#.attention category=activation",
    "alloc 400 p# operator=aten::softmax module=layers.#.attention category=activation",
    "alloc 100 o# operator=aten::linear module=layers.#.attention category=activation",
)


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
