"""Dtype and shape of what operators return, from their inputs."""

from __future__ import annotations

from typing import Any

import pytest

from tests.read.kineto.written import CUDA, loaded, memory, ran


def returned(
    name: str, size: int, inputs: dict[str, Any], device: dict[str, Any] | None = None
) -> str | None:
    """What an allocation of a size in an operator is."""
    trace = loaded(ran(f"aten::{name}", 1, 9, args=inputs), memory(f"2 100 {size} {size}", **(device or {})))
    row = int(trace.events.tensor[0])
    return str(trace.tensors[row]) if row >= 0 else None


def tensors(
    *shapes: list[int], kind: str = "float", strides: list[list[int]] | None = None
) -> dict[str, Any]:
    def dense(shape: list[int]) -> list[int]:
        steps = [1] * len(shape)
        for place in range(len(shape) - 2, -1, -1):
            steps[place] = steps[place + 1] * shape[place + 1]
        return steps

    return {
        "Input type": [kind] * len(shapes),
        "Input Dims": list(shapes),
        "Input Strides": strides or [dense(shape) for shape in shapes],
    }


def test_empty_is_given_its_size_and_dtype() -> None:
    texts = {"Concrete Inputs": ["[2, 128]", "4", "", "", "False", ""]}
    assert returned("empty", 2048, texts) == "int64 [2, 128]"
    assert returned("empty", 2040, texts) is None
    by_default = {"Concrete Inputs": ["[2, 128]", "", "", "", "", ""]}
    assert returned("empty", 1024, by_default) == "float32 [2, 128]"
    assert returned("empty", 2048, by_default) == "float64 [2, 128]"
    assert returned("empty", 1024, {"Concrete Inputs": ["[2, 128]", "", "", "", "", "2"]}) is None


def test_empty_strided_is_given_its_strides() -> None:
    texts = {"Concrete Inputs": ["[2, 4]", "[1, 2]", "5", "0", "", ""]}
    assert returned("empty_strided", 16, texts) == "float16 [2, 4] strides [1, 2]"


@pytest.mark.parametrize(
    ("name", "shapes", "size", "shape"),
    [
        ("mm", ([3, 5], [5, 7]), 84, "float32 [3, 7]"),
        ("addmm", ([7], [3, 5], [5, 7]), 84, "float32 [3, 7]"),
        ("bmm", ([2, 3, 5], [2, 5, 7]), 168, "float32 [2, 3, 7]"),
        ("add", ([3, 1], [1, 7]), 84, None),  # no tensor has the full shape, so none tells the strides
        ("add", ([3, 7], [7]), 84, "float32 [3, 7]"),
        ("gelu", ([3, 7],), 84, "float32 [3, 7]"),
        ("gelu", ([3, 7],), 88, None),
        ("sort", ([3, 7],), 84, None),
    ],
)
def test_inputs_decide_what_operators_return(
    name: str, shapes: tuple[list[int], ...], size: int, shape: str | None
) -> None:
    assert returned(name, size, tensors(*shapes)) == shape


def test_strides_are_those_of_the_inputs() -> None:
    assert returned("relu", 24, tensors([2, 3], strides=[[1, 2]])) == "float32 [2, 3] strides [1, 2]"
    assert returned("relu", 24, tensors([2, 3], strides=[[6, 2]])) is None
    assert returned("add", 24, tensors([2, 3], [2, 3], strides=[[1, 2], [3, 1]])) is None


def test_dtypes_that_are_promoted_are_not_known() -> None:
    mixed = {**tensors([2, 3], [2, 3]), "Input type": ["float", "c10::Half"]}
    assert returned("add", 24, mixed) is None
    assert returned("mul", 48, tensors([2, 3], kind="long int")) is None


def test_a_caching_allocator_rounds() -> None:
    assert returned("gelu", 512, tensors([3, 7]), CUDA) == "float32 [3, 7]"
    assert returned("gelu", 1024, tensors([3, 7]), CUDA) is None


@pytest.mark.parametrize(
    "inputs",
    [
        {"Concrete Inputs": None},
        {"Concrete Inputs": ["[2, 128]"]},
        {"Concrete Inputs": [["[2, 128]"], 4, {}, [], 0, ""]},
        {"Concrete Inputs": ["[" + "9, " * 999 + "9]", "4", "", "", "", ""]},
        {"Concrete Inputs": ["[-2, 128]", "4", "", "", "", ""]},
        {**tensors([2, 3]), "Input Dims": [[[2, 3]]]},
        {**tensors([2, 3]), "Input Dims": [[-1] * 100]},
        {**tensors([2, 3]), "Input type": [{}]},
    ],
)
def test_what_a_hostile_file_says_is_no_tensor(inputs: dict[str, Any]) -> None:
    assert returned("empty", 24, inputs) is None
    assert returned("gelu", 24, inputs) is None
    assert returned("mm", 24, inputs) is None
