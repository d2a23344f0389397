"""What was alive before a Kineto trace: parameters, gradients and optimizer state, by sizes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tb_memplugin.trace import Category, MemoryTrace
from tests.read.kineto.written import CUDA, NODE, annotation, loaded, memory, operator, ran

FIRST = 10_000
"""Bytes at the start: gradients of 512 and 1,024 from the step before, and what else there was."""


def step(
    name: str, *in_optimizer: dict[str, Any], nodes: int = 2, last: str = "", first: int = FIRST
) -> MemoryTrace:
    """Two gradients from before are freed, two of the same sizes are made, and an optimizer steps."""
    at = first - 1536
    return loaded(
        memory(f"1 100 -512 {first - 512}", **CUDA),
        memory(f"2 200 -1024 {at}", **CUDA),
        operator("mm", 3, 4, 5),
        ran(NODE + "MmBackward0", 10, 20, args={"Sequence number": 5, "Fwd thread id": 1}),
        memory(f"12 300 512 {at + 512}", **CUDA),
        memory(f"14 400 1024 {at + 1536}", **CUDA),
        *(ran(f"{NODE}torch::autograd::AccumulateGrad", 21 + n, 21 + n) for n in range(nodes)),
        annotation(f"Optimizer.step#{name}.step", 30, 40),
        *in_optimizer,
        *([memory(last, **CUDA)] if last else []),
    )


def before(trace: MemoryTrace) -> dict[Category, int]:
    count: Counter[Category] = Counter()
    for category, size in zip(trace.start.category.tolist(), trace.start.bytes.tolist(), strict=True):
        count[Category(category)] += size
    return dict(count)


def test_each_gradient_has_a_parameter_and_adam_keeps_two_tensors_for_it() -> None:
    trace = step("AdamW")
    assert before(trace) == {
        Category.GRADIENT: 1536,
        Category.PARAMETER: 1536,
        Category.OPTIMIZER_STATE: 3072,
        Category.UNKNOWN: FIRST - 4 * 1536,
    }
    assert trace.live(0)[0] == FIRST
    assert [(note.code, note.bytes) for note in trace.notes if note.code == "start_inferred"] == [
        ("start_inferred", 4 * 1536)
    ]


@pytest.mark.parametrize(
    ("name", "called", "tensors"),
    [
        ("SGD", "aten::_foreach_add_", 0),
        ("SGD", "aten::_foreach_mul_", 1),
        ("Adam", "aten::_foreach_maximum_", 3),
        ("Lookahead", "aten::_foreach_mul_", 0),
    ],
)
def test_the_operators_of_a_step_tell_what_an_optimizer_keeps(name: str, called: str, tensors: int) -> None:
    assert before(step(name, ran(called, 31, 33))).get(Category.OPTIMIZER_STATE, 0) == tensors * 1536


def test_state_that_a_step_makes_was_not_there_before() -> None:
    trace = step("AdamW", ran("aten::zeros_like", 31, 33), last=f"32 500 1536 {FIRST + 1536}")
    assert Category.OPTIMIZER_STATE not in before(trace)
    assert trace.events.category[-1] == Category.OPTIMIZER_STATE


def test_nothing_is_said_if_gradients_are_not_one_block_each() -> None:
    assert before(step("AdamW", nodes=3)) == {Category.UNKNOWN: FIRST}


def test_nothing_is_said_of_parameters_that_may_have_been_allocated_in_the_trace() -> None:
    assert Category.PARAMETER not in before(step("AdamW", last=f"50 500 4096 {FIRST + 4096}"))


@pytest.mark.parametrize(("nodes", "expected"), [(2, 1536), (3, 0)])
def test_gradients_that_are_only_added_to_were_there_before(nodes: int, expected: int) -> None:
    """As of zero_grad(set_to_none=False): each node frees a gradient of its own after it has added it."""
    trace = loaded(
        operator("mm", 3, 4, 5),
        ran(NODE + "MmBackward0", 10, 20, args={"Sequence number": 5, "Fwd thread id": 1}),
        memory(f"12 300 512 {FIRST + 512}", **CUDA),
        memory(f"14 400 1024 {FIRST + 1536}", **CUDA),
        *(ran(f"{NODE}torch::autograd::AccumulateGrad", 21 + 3 * n, 23 + 3 * n) for n in range(nodes)),
        memory(f"22 300 -512 {FIRST + 1024}", **CUDA),
        memory(f"25 400 -1024 {FIRST}", **CUDA),
        annotation("Optimizer.step#SGD.step", 40, 50),
    )
    kept = before(trace)
    assert [kept.get(each, 0) for each in (Category.PARAMETER, Category.GRADIENT)] == [expected, expected]
    assert trace.start.bytes.sum() == FIRST


def test_no_more_is_said_than_there_was() -> None:
    trace = step("AdamW", ran("aten::maximum", 31, 32), ran("aten::x", 33, 34))
    assert before(trace)[Category.OPTIMIZER_STATE] == 3 * 1536
    assert trace.start.bytes.sum() == FIRST


@pytest.mark.parametrize(
    ("rest", "expected"),
    [
        (2 * 8_519_680, Category.WORKSPACE),
        (2 * 33_554_432 + 1_048_576, Category.WORKSPACE),
        (8_519_680, Category.UNKNOWN),
        (2 * 8_519_680 + 512, Category.UNKNOWN),
    ],
)
def test_what_is_left_is_workspaces_if_it_is_two_of_them_to_the_byte(rest: int, expected: Category) -> None:
    """One for the program's thread and one for autograd's, which cuBLAS keeps."""
    assert before(step("AdamW", first=4 * 1536 + rest))[expected] == rest


def test_devices_are_apart() -> None:
    """All bytes of the first device are parameters; the gradient from before on the second is still one."""
    second = {**CUDA, "Device Id": 1}
    trace = loaded(
        memory("1 900 -1024 1024", **second),
        operator("mm", 3, 4, 5),
        ran(NODE + "MmBackward0", 10, 20, args={"Sequence number": 5, "Fwd thread id": 1}),
        memory("12 300 512 1024", **CUDA),
        memory("14 400 1024 2048", **second),
        *(ran(f"{NODE}torch::autograd::AccumulateGrad", 21 + n, 21 + n) for n in range(2)),
    )
    columns = (trace.start.device, trace.start.category, trace.start.bytes)
    rows = sorted(zip(*(column.tolist() for column in columns), strict=True))
    assert rows == [
        (0, Category.PARAMETER, 512),
        (1, Category.PARAMETER, 1024),
        (1, Category.GRADIENT, 1024),
    ]
