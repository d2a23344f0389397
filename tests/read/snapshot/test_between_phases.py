"""What lines outside of every phase allocate: a batch, and what is gone before the next phase."""

from __future__ import annotations

import pytest

from tb_memplugin.read.snapshot.categories import categorised
from tb_memplugin.trace import Category, Phase
from tests.read.snapshot.test_categories import CALL, TORCH
from tests.recorded_program import program

MAIN = "<module> /work/train.py"
FORWARD = ("forward /work/model.py:7", CALL, f"{MAIN}:4")
STACKS = {
    "batch": (f"{MAIN}:3",),
    "forward": FORWARD,
    "update": ("<listcomp> /work/train.py:6", f"{MAIN}:6"),
    "module_to": (f"convert {TORCH}/nn/modules/module.py:1355", f"{MAIN}:1"),
    "inner": ("<dictcomp> /work/maml.py:5", "vmap_impl /env/torch/_functorch/vmap.py:316", f"{MAIN}:7"),
    "hook": (f"_single_tensor_adam {TORCH}/optim/adam.py:500", "hook /work/train.py:9"),
    "prefetch": ("copy /work/loader.py:5", "_bootstrap /usr/lib/python3.11/threading.py:1002"),
}


def step(number: int, *more: str) -> list[str]:
    """A step: a batch of 64 bytes is allocated, then that of the last step is freed; forward and backward."""
    last = [f"free x{number - 1}"] if number else []
    backward = ["alloc 40 g", "alloc 24 k", "free k", "free h", "free g"]
    return [f"alloc 64 x{number} at=batch", *last, "alloc 32 h at=forward", *backward, *more]


def of_size(size: int, *lines: str) -> list[str]:
    blocks = categorised(program(*lines, stacks=STACKS)).allocations
    return [Category(row).key for row in blocks.category[blocks.bytes == size].tolist()]


def test_what_enters_each_forward_and_is_gone_soon_is_input_also_the_last_that_stays():
    assert of_size(64, *step(0), *step(1), *step(2)) == ["input"] * 3


def test_without_backward_a_step_is_a_forward():
    calls = [
        f"alloc 64 x{row} at=batch;alloc 32 h at=forward;free h;free x{row}".split(";") for row in range(2)
    ]
    assert of_size(64, *calls[0], *calls[1]) == ["input"] * 2


def test_what_is_freed_before_the_next_phase_is_temporary():
    lines = [*step(0), "alloc 7 norm at=batch", "free norm", *step(1)]
    assert of_size(7, *lines) == ["temporary"]


@pytest.mark.parametrize(
    "lines",
    [
        ["alloc 32 e at=forward", *step(0)[:5], "free e", *step(0)[5:], "free x0"],
        ["alloc 64 w at=batch", *step(0)[-6:]],
        ["alloc 64 w at=batch", *(line for row in range(5) for line in step(row)[-6:]), "free w"],
        [line.replace("batch", "inner") for line in [*step(0), *step(1)]],
    ],
    ids=[
        "between two forwards of a backward",
        "never freed, nor any of its kind",
        "kept for five steps",
        "in torch.func",
    ],
)
def test_else_nothing_is_said(lines):
    assert set(of_size(64, *lines)) == {"unknown"}


def test_new_weights_of_one_line_are_no_data():
    weights = ["alloc 64 w at=module_to", "alloc 16 b at=module_to"]
    average = ["alloc 64 a{} at=update", "alloc 16 c{} at=update"]
    lines = list(weights)
    for row in range(3):
        last = [f"free a{row - 1}", f"free c{row - 1}"] if row else []
        lines += [*(line.format(row) for line in average), *last, *step(row)[-6:]]
    assert of_size(16, *lines) == ["parameter", "unknown", "unknown", "unknown"]


def test_an_optimizer_in_a_hook_of_backward_and_a_thread_that_loads_end_no_backward():
    """Gradients and state that autograd's thread allocates after it are backward's: 40 bytes each."""
    hooked = [
        *("alloc 64 x at=batch", "alloc 32 h at=forward", "alloc 40 g"),
        *("alloc 5 t at=hook", "free t", "free g", "alloc 6 y at=prefetch", "alloc 24 k", "free k"),
        *("free h", "free x", "alloc 32 h at=forward"),
    ]
    assert of_size(24, *hooked) == ["autograd_detail"]


def test_without_a_forward_in_the_trace_a_backward_goes_on():
    stacks = {"seed": (f"backward {TORCH}/_tensor.py:623", f"{MAIN}:5")}
    lines = ("alloc 4 seed at=seed", "alloc 24 k", "free k", "alloc 40 g")
    blocks = categorised(program(*lines, stacks=stacks)).allocations
    assert [Phase(row).key for row in blocks.phase.tolist()] == ["backward"] * 3
