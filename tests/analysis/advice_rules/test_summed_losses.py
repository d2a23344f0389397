"""The rule `summed_losses` on small histories."""

from __future__ import annotations

import pytest

from tb_memplugin.trace import MemoryTrace
from tests.analysis.advice_rules.findings import found, layers, why
from tests.traces import trace

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
