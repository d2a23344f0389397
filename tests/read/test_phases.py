"""Phases by the marks of forward, backward and optimizer, also where one runs inside another."""

from __future__ import annotations

import numpy as np

from tb_memplugin.read.phases import phase_at, phase_spans
from tb_memplugin.trace import Phase

LETTERS = {Phase.FORWARD: "f", Phase.BACKWARD: "b", Phase.OPTIMIZER: "o"}


def drawn(
    forward: str = "", backward: str = "", optimizer: str = "", steps: str = "", making: str | None = None
) -> str:
    """The phase of each nanosecond as a letter. Marks are drawn as `[`, `=` and `]`, steps begin at `|`."""
    made = None if making is None else _spans(making)
    spans = phase_spans(_spans(forward), _spans(backward), _spans(optimizer), _places(steps, "|"), made)
    line = [" "] * max(map(len, (forward, backward, optimizer)))
    for start, end, phase in zip(spans.start_ns, spans.end_ns, spans.phase, strict=True):
        assert set(line[start:end]) == {" "}, "stretches overlap"
        line[start:end] = LETTERS[Phase(int(phase))] * int(end - start)
    return "".join(line).rstrip()


def _places(text: str, mark: str) -> np.ndarray:
    return np.array([place for place, letter in enumerate(text) if letter == mark], np.int64)


def _spans(text: str) -> tuple[np.ndarray, np.ndarray]:
    return _places(text, "["), _places(text, "]") + 1


def test_a_forward_reaches_up_to_its_backward_and_nodes_are_one_stretch():
    assert (
        drawn(
            forward="  [=] []",
            backward="            [] [==]",
            optimizer="                     [==]",
        )
        == "  ffffffffffbbbbbbb  oooo"
    )


def test_a_forward_that_leads_to_no_backward_stays_as_it_is():
    assert drawn(forward=" [=]  [=]") == " fff  fff"


def test_forwards_before_the_first_that_makes_nodes_do_not_reach_to_the_next():
    forward, backward = " [] []  [=] []", "                []"
    assert drawn(forward, backward, making="        [=]") == " ff ff  ffffffffbb"
    assert drawn(forward, backward, making="    []") == " ff ffffffffffffbb"


def test_where_none_makes_nodes_all_reach_to_the_backward():
    assert drawn(" [] []", "        []", making="") == " fffffffbb"


def test_nothing_reaches_over_the_beginning_of_a_step():
    assert drawn(forward=" [=]", backward="       [=]", steps="|    |") == " fff   bbb"


def test_a_closure_in_an_optimizers_step_is_forward_and_backward():
    assert (
        drawn(
            optimizer="[=======================]",
            forward="   [==]     [==]",
            backward="          []       [] []",
        )
        == "ooofffffffbbfffffffbbbbbo"
    )


def test_what_lies_between_two_closures_is_the_optimizers():
    assert (
        drawn(
            optimizer="[==================]",
            forward=" [=]       []",
            backward="     []       []",
        )
        == "offffbboooofffbboooo"
    )


def test_an_optimizers_step_in_a_hook_of_backward_cuts_it():
    assert drawn(backward=" [=======] [=]", optimizer="    [==]") == " bbboooobbbbbb"


def test_a_backward_in_a_modules_forward_is_one_stretch():
    assert drawn(forward="[===============]", backward="    [] []         [=]") == "ffffbbbbbfffffffffbbb"


def test_what_a_backward_recomputes_is_no_forward():
    assert drawn(forward="[=]    [=]", backward="    [=======]") == "ffffbbbbbbbbb"


def test_an_optimizer_between_two_backwards_parts_them():
    assert drawn(backward="[=]         [=]", optimizer="     [==]") == "bbb  oooo   bbb"


def test_without_marks_there_is_no_stretch():
    assert drawn() == ""


def test_marks_at_one_moment_last_no_time():
    """A program may stop its clock."""
    mark = np.array([5]), np.array([5])
    phases = phase_at(phase_spans(mark, mark, mark, np.array([5])), np.array([4, 5, 6]))
    assert phases.tolist() == [Phase.OTHER] * 3
