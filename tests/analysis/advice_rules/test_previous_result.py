"""The rule `previous_result` on small histories."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tb_memplugin.trace import Kind, MemoryTrace, OutOfMemory
from tests.analysis.advice_rules.findings import (
    CALL_OF_MODULE,
    found,
    layers,
    stacked,
    why,
)
from tests.traces import trace


def test_results_that_a_list_keeps_pile_up() -> None:
    """Four results of 400 beside 100 inside. Freed when the next is born, one of 400 and 100 are left."""
    lines = [
        line.replace("#", str(number))
        for number in range(4)
        for line in ("alloc 100 a# phase=forward", "alloc 400 r# phase=forward", "free a#")
    ]
    history = trace(*lines, *(f"free r{number}" for number in range(4)))
    stacks = ("forward net.py:3",), ("forward net.py:9",)
    finding = found(stacked(history, *stacks), "previous_result")
    assert (finding.bytes, finding.of_bytes, finding.evidence[0].bytes) == (1200, 1700, 1200)
    trained = stacked(trace(*lines, "alloc 5 g phase=backward category=gradient"), *stacks)
    assert "No result of an earlier forward" in why(trained, "previous_result")


def test_two_results_of_one_line_are_of_the_same_forward() -> None:
    """Four forwards with 100 inside return 400 twice, each by a number of 8: the last two are needed."""
    each = (
        "alloc 100 a# phase=forward",
        *("alloc 8 n# phase=forward", "alloc 400 r# phase=forward", "free n#"),
        *("alloc 8 m# phase=forward", "alloc 400 s# phase=forward", "free m#"),
        "free a#",
    )
    freed = (f"free {name}{number}" for number in range(4) for name in "rs")
    stacks = ("forward net.py:3",), *[("forward net.py:9",)] * 4
    finding = found(stacked(trace(*layers(*each, count=4), *freed), *stacks), "previous_result")
    assert (finding.bytes, finding.of_bytes) == (6 * 400, 8 * 400 + 100 + 8)


def test_results_that_a_list_keeps_pile_up_beside_what_the_running_forward_needs() -> None:
    """At the peak three results of 400 and 600 + 500 inside; who frees these is not known."""
    each = (
        *("alloc 600 a# phase=forward", "alloc 500 b# phase=forward", "free a#"),
        *("alloc 50 c# phase=forward", "free b#", "alloc 400 r# phase=forward", "free c#"),
    )
    stacks = ("forward net.py:3",), ("forward net.py:5",), ("forward net.py:7",), ("forward net.py:9",)
    finding = found(stacked(trace(*layers(*each, count=4)), *stacks), "previous_result")
    assert (finding.bytes, finding.of_bytes, finding.subject) == (800, 2300, "net.py:9 (forward)")


def test_the_output_of_a_layer_is_alive_while_the_next_of_its_class_runs() -> None:
    """A convolution and a ReLU, twice: the second one's input is freed with what it returns."""
    each = "alloc 400 c# module=l#.conv phase=forward", "alloc 400 x# module=l#.relu phase=forward"
    first, second = layers(*each, count=2)[:2], layers(*each, count=2)[2:]
    lines = trace(*first, "free c0", *second, "free c1", "free x0")
    history = stacked(lines, ("forward net.py:3",), ("forward net.py:9",))
    assert "No result of an earlier forward" in why(history, "previous_result")


def hooked(*, layers_: int = 3, sites: int = 4, forwards: int = 3) -> MemoryTrace:
    """Forwards of layers that allocate 100 in each of some lines; hooks free the old 100 for the new one."""
    lines: list[str] = []
    for forward in range(forwards):
        for number in range(layers_ * sites):
            lines.append(f"alloc 100 a{forward}.{number} phase=forward")
            lines += [f"free a{forward - 1}.{number}"] if forward else []
    return stacked(trace("start 50 w", *lines), *((f"forward net.py:{line}",) for line in range(sites)))


def test_hooks_that_store_outputs_keep_them_until_the_next_forward() -> None:
    """12 of 100 and a new one, beside 50. Freed when the third after each is born, three are left."""
    finding = found(hooked(), "previous_result")
    assert (finding.bytes, finding.of_bytes) == (1000, 1350)
    assert "Remove forward hooks" in finding.what_to_do


def test_states_are_kept_by_no_hook() -> None:
    """Two of each layer: the next forward reads them."""
    assert "No result of an earlier forward" in why(hooked(sites=2), "previous_result")


def test_variables_of_a_loop_over_layers_are_kept_by_no_hook() -> None:
    """Four of 100, each until the next of its line; only that of the last line may be a result."""
    assert found(hooked(layers_=1), "previous_result").bytes == 100


def test_the_lines_of_the_next_layer_are_no_next_forward() -> None:
    """Each of three layers returns 400 beside its own 400 and 600, by a line that made the 400, too."""
    each = (
        *("alloc 400 n# module=l# phase=forward", "alloc 600 u# module=l#.up phase=forward"),
        *("alloc 400 x# module=l# phase=forward", "free u#", "free n#"),
    )
    stacks = ("forward net.py:3",), ("forward net.py:5",), ("forward net.py:3",)
    history = stacked(trace(*layers(*each, count=3)), *stacks)
    assert "No result of an earlier forward" in why(history, "previous_result")


def test_results_that_outlive_their_backward_pile_up() -> None:
    """Three of 400, with 100 that each backward frees and its 5; the last of 400 is needed."""
    each = (
        "alloc 400 r# phase=forward",
        "alloc 100 a# phase=forward",
        "alloc 5 t# phase=backward",
        "free t# phase=backward",
        "free a# phase=backward",
    )
    history = trace(*layers(*each, count=3), *(f"free r{number}" for number in range(3)))
    stacks = ("forward net.py:9",), ("forward net.py:3",), ("step train.py:2",)
    finding = found(stacked(history, *stacks), "previous_result")
    assert (finding.bytes, finding.of_bytes, finding.subject) == (800, 1305, "net.py:9 (forward)")


def test_what_an_error_frees_was_no_result_of_an_earlier_forward() -> None:
    """Two results of one line, both alive when a request fails, and freed soon after."""
    history = replace(results(kept=True), ooms=(OutOfMemory(5, 1, 0),))
    assert "No result of an earlier forward" in why(history, "previous_result")


REQUEST = ("alloc 400 c#", "alloc 100 a# phase=forward", "free a#")


SERVED = ("serve server.py:4",), ("forward net.py:3", CALL_OF_MODULE, "serve server.py:5")


def test_what_is_allocated_for_each_forward_and_kept_piles_up() -> None:
    """Four caches of 400 beside 100 inside. Freed before the next request, 500 are left."""
    history = trace(*layers(*REQUEST, count=4), *(f"free c{number}" for number in range(4)))
    finding = found(stacked(history, *SERVED), "previous_result")
    assert (finding.bytes, finding.of_bytes, finding.subject) == (1200, 1700, "server.py:4 (serve)")


def test_a_queue_that_stays_as_long_is_no_pile() -> None:
    """Three requests at a time: the oldest ends before the next begins."""
    lines = layers(*REQUEST, count=3)
    for number in range(3, 8):
        lines += [f"free c{number - 3}", *(line.replace("#", str(number)) for line in REQUEST)]
    assert "No result of an earlier forward" in why(stacked(trace(*lines), *SERVED), "previous_result")


def test_caches_that_are_freed_in_turn_are_no_pile() -> None:
    """Three layers get a cache with a prompt, and free it when they have another, in their next call."""
    turns = layers("alloc 300 d#", "free c#", "alloc 100 b# phase=forward", "free b#", count=3)
    history = trace(*layers(*REQUEST, count=3), *turns)
    assert "No result of an earlier forward" in why(stacked(history, *SERVED), "previous_result")


def test_caches_that_serve_many_forwards_are_no_pile() -> None:
    """Three layers get a cache in their first call, and use it in ten more."""
    calls = [
        line for number in range(30) for line in (f"alloc 100 b{number} phase=forward", f"free b{number}")
    ]
    history = trace(*layers(*REQUEST, count=3), *calls, *(f"free c{number}" for number in range(3)))
    stacks = SERVED * 3 + SERVED[1:] * 30
    assert "No result of an earlier forward" in why(stacked(history, *stacks), "previous_result")


@pytest.mark.parametrize(("again", "copies"), [(0, 0), (1, 0), (9, 0), (0, 9)])
def test_outputs_of_all_layers_that_a_forward_returned_pile_up(again: int, copies: int) -> None:
    """Four of 400, and 100 inside. Freed by the next layer, 500 are left.

    Not if the layers run again, or copies take the place of each. What the last layer returned may be of
    another line.
    """
    each = ("alloc 100 a# phase=forward", "alloc 400 r# phase=forward", "free a#")
    lines = layers(*each, count=4)
    lines += layers("alloc 100 b# phase=forward", "free b#", count=again)
    history = trace(*lines, *layers(*(f"alloc 1 n#{copy}" for copy in range(copies)), "free r#", count=4))
    inner, outer = (
        (CALL_OF_MODULE, "forward model.py:7", CALL_OF_MODULE, "main main.py:1"),
        ("main main.py:2",),
    )
    history = stacked(history, ("forward net.py:3", *inner), ("forward net.py:9", *inner), inner[1:], outer)
    row = history.events.stack.copy()
    row[history.events.kind == Kind.ALLOC] = [0, 1] * 4 + [0] * again + [3] * 4 * copies
    row[-4 - 4 * copies :] = 3
    history = replace(history, events=replace(history.events, stack=row))
    if again > 1 or copies:
        assert "No result of an earlier forward" in why(history, "previous_result")
    else:
        finding = found(history, "previous_result")
        assert (finding.bytes, finding.of_bytes, finding.subject) == (1200, 1700, "net.py:9 (forward)")


def results(*, kept: bool) -> MemoryTrace:
    """Three forwards of 100 inside and 400 returned, which lives until the next is returned, or not."""
    lines: list[str] = []
    for number in range(3):
        lines += [
            f"alloc 100 a{number} phase=forward",
            f"alloc 400 r{number} phase=forward",
            f"free a{number}",
        ]
        if not kept:
            lines.append(f"free r{number}")
        elif number:
            lines.append(f"free r{number - 1}")
    return stacked(trace(*lines), ("forward net.py:3",), ("forward net.py:9",))


def test_what_a_forward_returned_is_alive_while_the_next_runs() -> None:
    """The old 400 beside 100 + 400; freed before the forward, 500 are left."""
    finding = found(results(kept=True), "previous_result")
    assert (finding.bytes, finding.of_bytes, finding.subject) == (400, 900, "net.py:9 (forward)")


def test_results_that_are_freed_before_the_next_forward_are_as_they_should_be() -> None:
    assert "No result of an earlier forward" in why(results(kept=False), "previous_result")


def recorded_steps(*, first: int) -> MemoryTrace:
    """Three steps that return 100 and 400, alive until the next are; the first has `first` inside."""
    lines = ["start 100 f1 category=activation", "start 400 r1 category=activation"]
    for step in (2, 3, 4):
        inside = first if step == 2 else 100
        lines += [f"step {step}", f"alloc {inside} a{step} phase=forward"]
        lines += [f"alloc 100 f{step} phase=forward", f"alloc 400 r{step} phase=forward"]
        lines += [f"free {name}" for name in (f"f{step - 1}", f"r{step - 1}", f"a{step}")]
    return stacked(trace(*lines), ("forward net.py:3",), ("forward net.py:7",), ("forward net.py:9",))


def test_a_result_from_before_the_recording_is_judged_in_the_next_step_that_is_as_high() -> None:
    """Each step has 100 + 100 + 400 beside the old 500; those of the first step have no line."""
    finding = found(recorded_steps(first=100), "previous_result")
    assert (finding.step, finding.bytes, finding.of_bytes) == (3, 400, 1100)
    assert finding.subject == "net.py:9 (forward)"


def test_a_step_that_peaks_lower_is_not_judged_for_the_first() -> None:
    """The first step peaks at 1800, the others at 1100: what they could save is no part of the peak."""
    assert "No result of an earlier forward" in why(recorded_steps(first=800), "previous_result")
