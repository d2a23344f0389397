"""The rule `avoidable_tensors` on small histories."""

from __future__ import annotations

import pytest

from tb_memplugin.trace import MemoryTrace
from tests.analysis.advice_rules.findings import CALL_OF_MODULE, found, stacked, why
from tests.traces import trace


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
