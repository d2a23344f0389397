"""The rule `parameter_copies` on small histories."""

from __future__ import annotations

import pytest

from tests.analysis.advice_rules.findings import (
    CALL_OF_MODULE,
    COPY,
    MODEL,
    found,
    layers,
    stacked,
    why,
)
from tests.traces import trace


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


SIZES = (10, 20, 30, 40)


PARAMETERS = [f"alloc {size} w{size} category=parameter" for size in SIZES]


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
