"""Parameters by their gradients, old optimizer state by the new: only where all agree."""

from __future__ import annotations

import pytest

from tb_memplugin.read.cublas import LARGE_WORKSPACE, LT_WORKSPACE, MOST_WORKSPACES, WORKSPACE
from tb_memplugin.read.snapshot.categories import categorised
from tb_memplugin.read.snapshot.same_sizes import FEWEST
from tb_memplugin.read.snapshot.trace import trace_from_snapshot
from tb_memplugin.trace import Category, MemoryTrace
from tests.read.snapshot.test_categories import STACKS, categories
from tests.recorded_program import program
from tests.snapshots import block, segment

SIZES = [1 << row for row in range(FEWEST)]
WEIGHTS = [f"before {size} w{size}" for size in SIZES]
GRADIENTS = [f"alloc {size} g{size} at=backward" for size in SIZES]
FORWARD = "alloc 5000 h at=forward"


def of_starts(*lines: str) -> list[str]:
    """Categories of the blocks from before, in order."""
    trace = program(*lines, stacks=STACKS)
    return all_categories(trace)[: len(trace.start)]


def all_categories(trace: MemoryTrace) -> list[str]:
    return [Category(row).key for row in categorised(trace).allocations.category.tolist()]


def test_blocks_with_a_gradient_of_their_size_each_are_parameters():
    assert of_starts(*WEIGHTS, "before 9000 other", FORWARD, *GRADIENTS) == ["parameter"] * FEWEST + [
        "unknown"
    ]


@pytest.mark.parametrize(
    "lines",
    [
        [*WEIGHTS, "before 8 buffer", FORWARD, *GRADIENTS],
        [*WEIGHTS, FORWARD, *GRADIENTS[1:]],
        [*WEIGHTS[1:], FORWARD, *GRADIENTS],
        [*WEIGHTS, *(line.replace(" w", " m") for line in WEIGHTS), FORWARD, *GRADIENTS],
    ],
    ids=["one more", "a gradient less", "a weight less", "momentum too"],
)
def test_where_one_does_not_fit_nothing_is_said(lines):
    assert set(of_starts(*lines)) == {"unknown"}


def test_momentum_does_not_pass_for_parameters_that_frames_tell():
    known = [f"before {size} p{size} at=module_to" for size in SIZES]
    stacks = {**STACKS, "module_to": ("convert /env/torch/nn/modules/module.py:1355",)}
    trace = program(*known, *WEIGHTS, FORWARD, *GRADIENTS, stacks=stacks)
    assert all_categories(trace)[: 2 * FEWEST] == ["parameter"] * FEWEST + ["unknown"] * FEWEST


def test_gradients_of_several_steps_count_once():
    step = [FORWARD, *GRADIENTS, *(f"free g{size} at=zero_grad" for size in SIZES), "free h"]
    assert of_starts(*WEIGHTS, *step, *step, *step) == ["parameter"] * FEWEST


def test_state_that_a_step_replaces_is_state():
    old = [f"before {size} old{size}" for size in SIZES]
    replaced = [
        line for size in SIZES for line in (f"alloc {size} new{size} at=state", f"free old{size} at=foreach")
    ]
    step = ["START Optimizer.step#A.step", *replaced, "END Optimizer.step#A.step"]
    assert of_starts(*WEIGHTS, *old, FORWARD, *GRADIENTS, *step) == (
        ["parameter"] * FEWEST + ["optimizer_state"] * FEWEST
    )
    assert of_starts(*old, "START Optimizer.step#A.step", *replaced[:-1]) == ["unknown"] * FEWEST


def test_a_block_of_cublas_own_size_that_stays_is_a_workspace():
    lines = (f"before {WORKSPACE} a", "alloc 1 x")
    assert categories(program(*lines)) == {WORKSPACE: "workspace", 1: "unknown"}
    assert categories(program(*lines, "free a"))[WORKSPACE] == "unknown"


PYTHON = {"python": ("forward /env/torch/nn/modules/linear.py:116", "train /work/train.py:3")}


def test_a_workspace_is_one_with_and_without_a_python_stack_and_inside_a_window():
    """PyTorch allocates it in the first product of a thread, so it looks like a result of that."""
    before = program(f"before {WORKSPACE} a at=python", "alloc 1 x", stacks=PYTHON)
    assert categories(before)[WORKSPACE] == "workspace"
    inside = program(f"alloc {WORKSPACE} a at=python", "alloc 9 h at=python", stacks=PYTHON)
    assert categories(inside) == {WORKSPACE: "workspace", 9: "activation"}


@pytest.mark.parametrize(
    "lines",
    [
        [f"alloc {WORKSPACE} a at=forward"],
        [f"alloc {WORKSPACE} a at=python", f"alloc {WORKSPACE} b at=python", "free b"],
        [f"alloc {WORKSPACE} a{row} at=python" for row in range(MOST_WORKSPACES[WORKSPACE] + 1)],
    ],
    ids=["frames of C++ name no workspace", "one of the size was freed", "too many for workspaces"],
)
def test_a_tensor_of_the_size_of_a_workspace_is_none(lines):
    assert "workspace" not in all_categories(program(*lines, stacks={**STACKS, **PYTHON}))


ONCE = [
    *("alloc 9 h at=python", f"alloc {LARGE_WORKSPACE} a at=python", f"alloc {LT_WORKSPACE} b at=python"),
    *("alloc 5 other", "free h", f"alloc {LARGE_WORKSPACE} tensor at=python", "free tensor"),
]


def test_of_tensors_of_the_size_on_hopper_what_only_the_first_call_allocates_and_keeps_is_a_workspace():
    first, large, of_lt, _, tensor = all_categories(program(*ONCE, stacks=PYTHON))
    assert (first, tensor) == ("activation", "activation")
    assert (large, of_lt) == ("workspace", "workspace")


@pytest.mark.parametrize(
    "lines",
    [ONCE[:4], [*ONCE, "free a"], [*ONCE, "alloc 9 h at=python", f"alloc {LARGE_WORKSPACE} c at=python"]],
    ids=["one call alone", "freed", "in another call, too"],
)
def test_else_it_is_what_its_stack_says(lines):
    assert "workspace" not in all_categories(program(*lines, stacks=PYTHON))


FIRST_BACKWARD = f"alloc {LARGE_WORKSPACE} ours"
LATER = ["alloc 9 h at=python", "alloc 7 g", "alloc 5 k", "free g", "free k", "free h"]
TWICE = [
    *(f"alloc {LARGE_WORKSPACE} theirs at=once", *LATER[:2], FIRST_BACKWARD, *LATER[2:]),
    *LATER,
]
TRAINED = {**PYTHON, "once": ("target /work/train.py:1",)}


def large_blocks(*lines: str) -> list[str]:
    trace = categorised(program(*lines, stacks=TRAINED))
    large = trace.allocations.bytes == LARGE_WORKSPACE
    return [Category(row).key for row in trace.allocations.category[large].tolist()]


def test_what_only_the_first_backward_allocates_on_hopper_is_a_workspace_and_tells_the_forwards():
    """In a line that runs once, nothing else tells a workspace from a tensor of its size."""
    assert large_blocks(*TWICE) == ["workspace", "workspace"]
    third = f"alloc {LARGE_WORKSPACE} weight at=once"
    assert large_blocks(third, *TWICE).count("workspace") == 1


def test_a_gradient_of_the_size_beside_it_is_none():
    backward = [*LATER[:-1], "alloc 33554432 g", "free g", "free h"]
    last = [*LATER[:-1], "alloc 33554432 kept"]
    assert large_blocks(*backward[:2], FIRST_BACKWARD, *backward[2:], *last) == [
        "workspace",
        "autograd_detail",
        "gradient",
    ]


@pytest.mark.parametrize(
    "lines",
    [
        TWICE[: -len(LATER)],
        [*TWICE[:-5], f"alloc {LARGE_WORKSPACE} again", *TWICE[-5:]],
        [*TWICE[:-5], "alloc 3 other", *TWICE[-5:]],
        [*TWICE, "free ours"],
    ],
    ids=["one backward", "a gradient of the size in each", "another backward", "freed"],
)
def test_else_a_block_of_backward_of_this_size_is_none(lines):
    assert "workspace" not in large_blocks(*lines)


def test_a_snapshot_without_a_trace_may_know_gradients_by_their_stacks():
    """Nothing happens in it, so no backward begins; the blocks were all there."""
    accumulate = [{"name": "torch::autograd::AccumulateGrad::apply()", "filename": "??", "line": 0}]
    sizes = [512 * (row + 1) for row in range(FEWEST)]
    weights = [block(1000 * row, size, size=size) for row, size in enumerate(sizes)]
    gradients = [
        {**block(90_000 + 9000 * row, size, size=size), "frames": accumulate}
        for row, size in enumerate(sizes)
    ]
    trace = trace_from_snapshot([segment(*weights, *gradients, total=1 << 20)], "x")
    assert [Category(row).key for row in trace.allocations.category.tolist()] == (
        ["parameter"] * FEWEST + ["gradient"] * FEWEST
    )
