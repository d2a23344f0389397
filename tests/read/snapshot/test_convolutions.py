"""Workspaces of convolutions, where only Python's frames are recorded: freed before the operator returns."""

from __future__ import annotations

import pytest

from tb_memplugin.analysis import why
from tb_memplugin.read.snapshot.categories import categorised
from tb_memplugin.trace import Category
from tests.read.snapshot.test_categories import CALL, STACKS, TORCH
from tests.recorded_program import program

OUTER = ("forward /work/model.py:7", CALL, "train /work/train.py:3")
CONVOLUTION = (f"_conv_forward {TORCH}/nn/modules/conv.py:560", CALL, *OUTER)
PROGRAM_STACKS = {
    **STACKS,
    "conv": CONVOLUTION,
    "other": (*CONVOLUTION[:2], "forward /work/model.py:8", CALL, "train /work/train.py:3"),
    "linear": (f"forward {TORCH}/nn/modules/linear.py:134", CALL, *OUTER),
    "native": ("at::native::cudnn_convolution ??:0", *CONVOLUTION),
}
BACKWARD = ["alloc 1 g at=backward", "free r"]


def category_of(name_bytes: int, *lines: str) -> str:
    blocks = categorised(program(*lines, stacks=PROGRAM_STACKS)).allocations
    (row,) = [row for row, size in enumerate(blocks.bytes.tolist()) if size == name_bytes]
    return Category(int(blocks.category[row])).key


@pytest.mark.parametrize("after", [BACKWARD, ["alloc 9 s at=other"], []], ids=["backward", "forward", "end"])
def test_what_a_convolution_frees_beside_its_result_is_temporary(after: list[str]) -> None:
    lines = ["alloc 100 r at=conv", "alloc 640 w at=conv", "free w", *after]
    assert category_of(640, *lines) == "temporary"
    assert category_of(100, *lines) == "activation"


def test_why_it_is_temporary() -> None:
    trace = program("alloc 100 r at=conv", "alloc 640 w at=conv", "free w", *BACKWARD, stacks=PROGRAM_STACKS)
    assert why(categorised(trace), 1) == "temporary: freed before the operator that allocated it returned"


@pytest.mark.parametrize(
    "lines",
    [
        ["alloc 100 r at=linear", "alloc 640 w at=linear", "free w", *BACKWARD],
        ["alloc 100 r at=conv", "alloc 640 w at=conv", *BACKWARD, "free w"],
        ["alloc 640 w at=conv", "alloc 100 r at=conv", "free w", *BACKWARD],
        ["alloc 100 r at=conv", "alloc 640 w at=conv", "alloc 9 s at=other", "free w", *BACKWARD],
        ["alloc 100 r at=conv", "alloc 640 w at=other", "free w", *BACKWARD],
        ["alloc 100 r at=conv", "free r", "alloc 640 w at=conv", "free w", "alloc 1 r", *BACKWARD],
        ["alloc 100 r at=conv", "alloc 640 w at=native", "free w", *BACKWARD],
    ],
    ids=[
        "another operator",
        "saved for backward",
        "two in a row, of which the second stays",
        "another line's input",
        "another line's output",
        "no result stays",
        "frames of C++ tell an operator's end themselves",
    ],
)
def test_what_may_be_the_result_of_a_convolution_is_an_activation(lines: list[str]) -> None:
    assert category_of(640, *lines) == "activation"


def test_a_result_that_is_added_to_another_is_an_activation() -> None:
    lines = ["alloc 100 r at=conv", "alloc 100 a at=conv", "free a", *BACKWARD]
    blocks = categorised(program(*lines, stacks=PROGRAM_STACKS)).allocations
    assert [Category(row).key for row in blocks.category[:2].tolist()] == ["activation", "activation"]
