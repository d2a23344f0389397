"""Advice on gradients that stay allocated during forward: what they cost, and what only looks so."""

from __future__ import annotations

from tb_memplugin.trace import MemoryTrace
from tests.analysis.advice_rules.findings import STEPPED, evidence, found, layers, verdict, why
from tests.traces import trace

# Two layers: gradients of 400 and 100 bytes, activations of 300 and 600. Step 1 peaks in l2's backward, at
# 500 + 900 + 100. Without the gradients of the step before it peaks in l1's, at 100 + 300 + 400 + 400.
FIRST = (
    "start 400 g1 category=gradient module=l1 label=l1.weight",
    "start 100 g2 category=gradient module=l2 label=l2.weight",
    "step 0",
    "alloc 300 a1 module=l1 category=activation phase=forward",
    "alloc 600 a2 module=l2 category=activation phase=forward",
    "free a2 phase=backward",
    "free a1 phase=backward",
    "alloc 1 s phase=optimizer",
    "free s phase=optimizer",
)
SECOND_FORWARD = (
    "step 1",
    "alloc 300 b1 module=l1 category=activation phase=forward",
    "alloc 600 b2 module=l2 category=activation phase=forward",
)
SECOND_BACKWARD = (
    "alloc 100 t2 module=l2 phase=backward category=autograd_detail",
    "free t2 phase=backward",
    "free b2 phase=backward",
    "alloc 400 t1 module=l1 phase=backward category=autograd_detail",
    "free t1 phase=backward",
    "free b1 phase=backward",
)
BACKWARD = [("l2", 8, 10, "backward"), ("l1", 11, 13, "backward")]


def test_gradients_zeroed_in_place_cost_the_peak_what_is_not_yet_needed_again() -> None:
    finding = found(trace(*FIRST, *SECOND_FORWARD, *SECOND_BACKWARD, calls=BACKWARD), "kept_gradients")
    assert (finding.level, finding.step, finding.bytes, finding.of_bytes) == ("problem", 1, 300, 1500)
    assert evidence(finding) == [
        ("gradients alive during forward", 500),
        ("peak of step 1", 1500),
        ("the same peak without them", 1200),
        ("l1.weight", 400),
        ("l2.weight", 100),
    ]
    assert "zeroed in place" in finding.evidence[0].detail
    assert dict(finding.where.state) == {"step": "1", "search": "gradient", "listed": "lifetime"}


def test_where_no_steps_are_told_apart_one_goes_from_optimizer_to_optimizer() -> None:
    """The first forward has such gradients in its way too, but where they came from is not recorded."""
    first = [line.replace("alloc 600 a2", "alloc 700 a2") for line in FIRST if line != "step 0"]
    history = trace(*first, *SECOND_FORWARD[1:], *SECOND_BACKWARD, calls=BACKWARD)
    finding = found(history, "kept_gradients")
    assert (finding.bytes, finding.of_bytes) == (300, 1500)
    assert finding.evidence[1].what == "peak between two optimizer steps"


def test_without_module_calls_gradients_count_as_needed_from_backward_on() -> None:
    history = trace(*FIRST, *SECOND_FORWARD, *SECOND_BACKWARD)
    assert verdict(history, "kept_gradients")[0] == "fine"  # the peak is in backward
    forward = trace(*FIRST, *SECOND_FORWARD, "free b2 phase=backward", "free b1 phase=backward")
    assert found(forward, "kept_gradients").bytes == 500


def test_gradients_alive_when_the_recording_ends_before_a_backward_are_not_said_to_be_zeroed_in_place() -> (
    None
):
    """A validation after the optimizer step, the last of the recording: what comes next is not known."""
    finding = found(trace(*FIRST, *SECOND_FORWARD), "kept_gradients")
    assert finding.evidence[0].detail == "2, not freed by the end of the recording"


def test_gradients_freed_between_forward_and_backward_were_in_the_way_of_forward() -> None:
    history = trace(
        *FIRST,
        *SECOND_FORWARD,
        "free g1",
        "free g2",
        *("free b2 phase=backward", "free b1 phase=backward"),
    )
    finding = found(history, "kept_gradients")
    assert (finding.bytes, "only after forward" in finding.title) == (500, True)


def test_gradients_freed_before_the_next_forward_are_as_they_should_be() -> None:
    history = trace(*FIRST, "free g1", "free g2", *SECOND_FORWARD, *SECOND_BACKWARD, calls=BACKWARD)
    assert verdict(history, "kept_gradients")[0] == "fine"


def test_gradients_that_several_passes_sum_up_in_are_as_they_should_be() -> None:
    """Another optimizer steps every time, the one of these gradients every second time."""
    history = trace(
        *FIRST,
        *SECOND_FORWARD,
        *SECOND_BACKWARD,
        *("alloc 1 u phase=optimizer", "free u phase=optimizer", "free g1", "free g2"),
        *("step 2", "alloc 9 c phase=forward module=l1", "free c phase=backward"),
        calls=BACKWARD,
    )
    assert verdict(history, "kept_gradients")[0] == "fine"


def test_one_step_shows_the_gradients_of_before_that_its_forward_keeps() -> None:
    """They may be summed up on purpose, so this is an option."""
    finding = found(trace(*FIRST), "kept_gradients")
    assert (finding.level, finding.bytes, finding.of_bytes) == ("option", 500, 1400)


def test_a_forward_without_gradients_tells_nothing_of_them() -> None:
    history = trace(*FIRST[2:], "alloc 5 g phase=backward category=gradient")
    assert "a backward, and a forward after it" in verdict(history, "kept_gradients")[1]


def test_gradients_that_a_step_without_allocations_ends_are_summed_up() -> None:
    """Plain SGD allocates nothing: that it steps only after the second backward is known from its span."""
    history = trace(
        "alloc 300 a category=activation phase=forward",
        "alloc 100 g category=gradient phase=backward label=l.weight",
        "free a phase=backward",
        "alloc 300 b category=activation phase=forward",
        "alloc 10 t category=autograd_detail phase=backward",
        "free t phase=backward",
        "free b phase=backward",
        "free g phase=optimizer",
    )
    assert "by only 0 B" in verdict(history, "kept_gradients")[1]


def test_gradients_that_a_recording_of_forward_alone_keeps() -> None:
    history = trace(
        "start 100 w category=parameter",
        "start 100 g category=gradient",
        "alloc 300 a phase=forward category=activation",
    )
    finding = found(history, "kept_gradients")
    assert (finding.level, finding.bytes, finding.of_bytes) == ("option", 100, 500)
    assert "unless you accumulate gradients" in finding.price


def accumulated(*between: str) -> MemoryTrace:
    """Two forwards of 500 at their highest, each before a backward; a gradient of 100 outlives the second."""
    forward = (
        "alloc 300 a# phase=forward category=activation",
        "alloc 200 t# phase=forward category=activation",
        "free t#",
        "alloc 100 g# phase=backward category=gradient",
        "free a#",
    )
    first, second = ([line.replace("#", number) for line in forward] for number in "12")
    end = ("free g1", "alloc 1 x phase=backward")
    return trace("start 100 w category=parameter", *first, *between, *second, "free g2", *end)


def test_the_second_gradient_of_a_size_is_needed_again_when_backward_allocates_the_second() -> None:
    """At the peak, 100 + 200 + 600 + 100, backward adds to one of two gradients of 100."""
    gradients = [f"start 100 g{number} category=gradient" for number in "12"]
    forward = [f"alloc 300 a{number} phase=forward category=activation" for number in "12"]
    backward = layers("alloc 100 b# phase=backward", "free b#", "free a#", count=3)[3:]
    history = trace("start 100 w category=parameter", *gradients, *forward, *backward)
    assert (found(history, "kept_gradients").bytes, found(history, "kept_gradients").of_bytes) == (100, 1000)


def test_gradients_that_are_summed_up_over_two_backwards_are_needed() -> None:
    assert "by only 0 B" in why(accumulated(), "kept_gradients")


def test_gradients_that_are_alive_in_a_forward_after_an_optimizer_step_are_kept() -> None:
    assert found(accumulated(*STEPPED), "kept_gradients").bytes == 100
