"""The rule `unused_gradients` on small histories."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tb_memplugin.trace import MemoryTrace
from tests.analysis.advice_rules.findings import CALL_OF_MODULE, found, layers, why
from tests.traces import trace


def steps(*, frees: str, other: str = "60 a module=a") -> MemoryTrace:
    """Two steps of two layers, whose gradients an optimizer's zero_grad frees, or of one of them."""
    passed = ("alloc 10 x# phase=forward module=b", "alloc 100 b# phase=backward module=b category=gradient")
    once = f"alloc {other} phase=backward category=gradient"
    return trace("alloc 10 x phase=forward module=b", once, *layers(*passed, frees, count=3))


def test_gradients_that_stay_while_others_are_freed_are_used_by_nothing() -> None:
    finding = found(steps(frees="free b#"), "unused_gradients")
    assert (finding.bytes, finding.evidence[0].bytes, finding.subject) == (60, 60, "a")
    assert "needs gradients that are freed" in why(steps(frees="alloc 1 c#"), "unused_gradients")


def test_gradients_of_a_model_that_is_like_another_may_be_used_by_nothing() -> None:
    """A teacher of the student's class: its gradient has the size of the student's, and no name."""
    assert found(steps(frees="free b#", other="100 a module=b"), "unused_gradients").bytes == 100


def of_activations(*frees: str) -> MemoryTrace:
    """A backward through three activations of 100 and a parameter of 10."""
    gradients = [f"alloc 100 g{number} phase=backward operator=TanhBackward0" for number in range(3)]
    of_weight = "alloc 10 gw phase=backward category=gradient operator=MmBackward0"
    return trace("start 10 w category=parameter", "alloc 100 a phase=forward", *gradients, of_weight, *frees)


def test_gradients_of_activations_that_outlive_their_backward() -> None:
    """10 + 100 + 300 + 10. When the third is born, the first is not needed: 10 + 100 + 200."""
    history = of_activations("free a phase=backward", "free g0", "free g1", "free g2")
    finding = found(history, "unused_gradients")
    assert (finding.bytes, finding.of_bytes) == (420 - 310, 420)
    assert "no parameters" in finding.title


def test_gradients_of_activations_that_a_backward_frees_are_needed() -> None:
    frees = [f"free {name} phase=backward" for name in ("g0", "g1", "g2", "a")]
    assert "Every gradient is freed" in why(of_activations(*frees, "free gw"), "unused_gradients")


def test_the_backward_of_modules_below_all_that_are_trained_counts_too() -> None:
    """At the peak of 220, the gradient of 60 and 30 of its backward are alive, which nothing needs."""
    forward = ("alloc 20 h# phase=forward module=a", "alloc 10 x# phase=forward module=b")
    backward = (
        "alloc 100 b# phase=backward module=b category=gradient",
        "alloc 30 t# phase=backward module=a category=autograd_detail",
    )
    frees = ("free t#", "free h#", "free x#", "free b#")
    once = "alloc 60 a phase=backward module=a category=gradient"
    history = trace(
        *(line.replace("#", "") for line in (*forward, *backward)),
        once,
        *(line.replace("#", "") for line in frees),
        *layers(*forward, *backward, *frees, count=3),
    )
    finding = found(history, "unused_gradients")
    assert (finding.bytes, finding.of_bytes) == (60 + 30, 60 + 20 + 10 + 100 + 30)


def with_reference(*, hands_on: bool = False) -> MemoryTrace:
    """Three passes of a policy (2 x 100, a gradient of 5) and a reference (6 x 100, one of 7 that stays).

    The reference's backward runs first, from 20 to 20, and hands these on to the policy's or does not.
    """
    lines: list[str] = []
    for number in range(3):
        given = ["free s# phase=backward", "alloc 20 u# phase=backward"]
        each = (
            *(f"alloc 100 p{layer}# phase=forward" for layer in range(2)),
            *(f"alloc 100 r{layer}# phase=forward" for layer in range(6)),
            *("alloc 20 t# phase=backward", *(f"free r{layer}# phase=backward" for layer in (5, 4, 3, 2, 1))),
            *("alloc 20 s# phase=backward", "free t# phase=backward", "free r0# phase=backward"),
            "alloc 7 v# phase=backward category=gradient module=reference",
            *(["free v#"] if number else []),
            *(reversed(given) if hands_on else given),
            *("free p1# phase=backward", "alloc 5 g# phase=backward category=gradient module=policy"),
            *("free p0# phase=backward", "free u# phase=backward", "free g#"),
        )
        lines += [line.replace("#", f".{number}") for line in each]
    rows = [{"p": 0, "r": 1}.get(line.split()[-2 if "=" in line.split()[-1] else -1][0], 2) for line in lines]
    history = trace(*lines)
    stacks = [("forward net.py:3", CALL_OF_MODULE, f"step train.py:{row}") for row in range(2)]
    events = replace(history.events, stack=np.array(rows, np.int32))
    return replace(history, events=events, stacks=(*stacks, ("step train.py:9",)))


def test_a_reference_that_is_not_frozen_needs_no_graph() -> None:
    """7 + 200 + 600 + 20. Without a graph, two of the reference's are alive at a time: 200 + 200."""
    finding = found(with_reference(), "unused_gradients")
    assert (finding.bytes, finding.of_bytes) == (827 - 400, 827)


def test_a_model_that_hands_gradients_to_one_that_is_trained_needs_its_graph() -> None:
    """As features in a loss, not frozen: only the gradient of 7 is not needed."""
    assert "by only 7 B" in why(with_reference(hands_on=True), "unused_gradients")


def generator_and_critic(*, detached: bool) -> MemoryTrace:
    """Four turns of a critic (a gradient of 20) and its generator (40), each with an optimizer of its own.

    In the turns of the critic, which sees a larger batch, the generator has a graph if it is not detached.
    """
    lines = list[tuple[str, str]]()
    for turn in range(4):
        owner, other = ("generator", "critic") if turn % 2 else ("critic", "generator")
        size, of_other, score = (40, 20, 50) if turn % 2 else (20, 40, 150)
        hidden, after, unused = (
            [("alloc 300 hidden phase=forward module=generator", "model")],
            [
                (f"alloc {of_other} other phase=backward module={other} category=gradient", "backward"),
                ("free hidden phase=backward", "backward"),
            ],
            [("free other", f"zero_{other}")],
        )
        if detached and not turn % 2:
            hidden, after, unused = [], [], []
        lines += [
            *hidden,
            ("alloc 10 output phase=forward module=generator", "model"),
            (f"alloc {score} score phase=forward module=critic", "model"),
            (f"alloc {size} own phase=backward module={owner} category=gradient", "backward"),
            ("free score phase=backward", "backward"),
            *after,
            ("free output", "main"),
            (f"alloc {size} state{turn} phase=optimizer category=optimizer_state", f"step_{owner}"),
            ("free own", f"zero_{owner}"),
            *unused,
        ]
        lines += [(f"free state{turn}", f"step_{owner}")] if turn > 1 else []
    functions = sorted({function for _, function in lines})
    history = trace(*(line for line, _ in lines))
    rows = np.array([functions.index(function) for _, function in lines], np.int32)
    stacks = tuple((f"{function} train.py:{row}",) for row, function in enumerate(functions))
    return replace(history, events=replace(history.events, stack=rows), stacks=stacks)


def test_a_critic_needs_no_graph_of_its_generator() -> None:
    """Its turn: 60 of state, 300 + 10 + 150 and 20. Without the 300, the highest is the generator's."""
    finding = found(generator_and_critic(detached=False), "unused_gradients")
    assert (finding.bytes, finding.of_bytes) == (540 - (60 + 300 + 10 + 50 + 40), 540)
    detached = why(generator_and_critic(detached=True), "unused_gradients")
    assert detached == "Gradients that no optimizer uses raise the peak by only 0 B."
