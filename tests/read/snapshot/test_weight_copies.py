"""Deep copies of weights: averages, target networks, layers that are copied and trained, kept state dicts."""

from __future__ import annotations

import pytest

from tb_memplugin.analysis import why
from tb_memplugin.read.snapshot.categories import categorised
from tb_memplugin.trace import Category
from tests.read.snapshot.test_categories import STACKS as PHASES
from tests.read.snapshot.test_categories import TORCH
from tests.recorded_program import program

COPY = "/usr/lib/python3.11/copy.py"
IN_MODULE = (f"deepcopy {COPY}:153", f"_deepcopy_dict {COPY}:231", f"deepcopy {COPY}:146")
IN_STATE_DICT = (f"deepcopy {COPY}:153", f"_reconstruct {COPY}:297", f"deepcopy {COPY}:172")
IN_LIST = (f"deepcopy {COPY}:153", f"_deepcopy_list {COPY}:206", f"deepcopy {COPY}:146")
PARAMETER = f"__deepcopy__ {TORCH}/nn/parameter.py:79"
TENSOR = (f"clone {TORCH}/storage.py:255", f"__deepcopy__ {TORCH}/_tensor.py:174")
TRAIN, ELSEWHERE = "train /work/train.py:2", "__init__ /work/model.py:9"
STACKS = {
    **PHASES,
    "to": (f"convert {TORCH}/nn/modules/module.py:1355", f"to {TORCH}/nn/modules/module.py:9", TRAIN),
    "other_to": (f"convert {TORCH}/nn/modules/module.py:1355", "train /work/train.py:1"),
    "parameter": (PARAMETER, *IN_MODULE, TRAIN),
    "native": ("at::_ops::clone::call(at::Tensor const&) ??:0", PARAMETER, *IN_MODULE, TRAIN),
    "buffer": (*TENSOR, *IN_MODULE, TRAIN),
    "receiver": (f"__deepcopy__ {TORCH}/_tensor.py:180", *IN_MODULE, TRAIN),
    "layer": (PARAMETER, *IN_MODULE, ELSEWHERE),
    "layers": (PARAMETER, *IN_MODULE, "clones /work/model.py:4"),
    "kept": (*TENSOR, *IN_STATE_DICT, TRAIN),
    "listed": (*TENSOR, *IN_LIST, TRAIN),
}
MODEL = [f"alloc {size} w{size} at=to" for size in (100, 200, 50)]
STEP = ["alloc 7 h at=forward", "alloc 100 g100 at=backward", "alloc 200 g200 at=backward", "free h"]
LATER = ["free g100 at=zero_grad", "free g200 at=zero_grad", *STEP]


def copied(prefix: str, *lines: str) -> list[str]:
    """Return the categories of the blocks that stacks whose names begin so allocated, in order."""
    blocks = categorised(program(*lines, stacks=STACKS)).allocations
    names = [list(STACKS)[row] if row >= 0 else "" for row in blocks.stack.tolist()]
    return [
        Category(row).key
        for name, row in zip(names, blocks.category.tolist(), strict=True)
        if name in prefix.split()
    ]


def copy_of(at: str, *sizes: int) -> list[str]:
    return [f"alloc {size} {at}{row}{size} at={at}" for row, size in enumerate(sizes)]


AVERAGE = [*copy_of("parameter", 100, 200), "alloc 50 b at=buffer", "alloc 4 e at=receiver", "free e"]


@pytest.mark.parametrize("steps", [[], STEP, STEP + LATER], ids=["before a step", "one", "two"])
def test_a_deep_copy_of_a_model_is_a_copy_of_its_parameters_and_buffers(steps: list[str]) -> None:
    assert copied("parameter buffer", *MODEL, *AVERAGE, *steps) == ["parameter_copy"] * 3
    assert copied("to", *MODEL, *AVERAGE, *steps) == ["parameter"] * 3


def test_why_a_deep_copy_is_one() -> None:
    trace = categorised(program(*MODEL, *AVERAGE, *STEP, stacks=STACKS))
    assert why(trace, 3) == "parameter copy: functions in its call stack make such blocks"


def test_frames_of_operators_are_in_no_ones_way() -> None:
    assert copied("native", *MODEL, *copy_of("native", 100, 200), *STEP) == ["parameter_copy"] * 2


def test_a_copy_whose_original_is_gone_is_the_parameter() -> None:
    lines = [*MODEL, *copy_of("parameter", 100, 200), "free w100", "free w200", "alloc 7 h at=forward"]
    assert copied("parameter", *lines) == ["parameter"] * 2


def test_copies_that_have_gradients_are_parameters_and_a_copy_of_them_is_not() -> None:
    model = ["alloc 30 first at=to", *copy_of("layers", 30, 60, 30, 60), "alloc 60 second at=to"]
    average = copy_of("parameter", 30, 60, 30, 60, 30, 60)
    step = ["alloc 7 h at=forward", *(f"alloc {size} g{size} at=backward" for size in (30, 60) * 3)]
    assert copied("layers", *model, *average, *step) == ["parameter"] * 4
    assert copied("parameter", *model, *average, *step) == ["parameter_copy"] * 6


def test_nothing_is_said_where_the_gradients_may_be_of_either_copy() -> None:
    lines = [*MODEL, *copy_of("parameter", 100, 200), *copy_of("layer", 100, 200), *STEP]
    lines += ["alloc 100 k at=backward", "alloc 200 l at=backward"]
    assert copied("parameter layer", *lines) == ["unknown"] * 4


@pytest.mark.parametrize(
    ("at", "sizes", "category"),
    [
        ("kept", (100, 200, 50), "parameter_copy"),
        ("kept", (100, 200), "unknown"),
        ("kept", (100, 200, 51), "unknown"),
        ("kept", (100, 200, 50, 50), "unknown"),
        ("listed", (100, 200, 50), "unknown"),
    ],
    ids=["all", "one less", "another size", "one more", "a list"],
)
def test_a_deep_copy_of_a_state_dict_has_the_sizes_of_all_weights(
    at: str, sizes: tuple[int, ...], category: str
) -> None:
    assert copied(at, *MODEL, *copy_of(at, *sizes)) == [category] * len(sizes)


def test_a_state_dict_is_of_one_of_two_models() -> None:
    other = [f"alloc {size} o{size} at=other_to" for size in (300, 400, 500)]
    assert copied("kept", *MODEL, *other, *copy_of("kept", 300, 400, 500)) == ["parameter_copy"] * 3
    assert copied("kept", *MODEL, *other, *copy_of("kept", 100, 400, 500)) == ["unknown"] * 3
