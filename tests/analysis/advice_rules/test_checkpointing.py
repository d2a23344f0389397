"""The rule `checkpointing` on small histories."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tb_memplugin.trace import MemoryTrace
from tests.analysis.advice_rules.findings import MODEL, found, layers, stacked, why
from tests.traces import trace

CALL = "forward model.py:20"


def loop(*, layers: int, of: str = "phase=forward category=activation") -> MemoryTrace:
    """Each layer keeps 300 inside and 100 as its output; backward frees the last layer first."""
    born = [
        line.replace("#", str(at))
        for at in range(layers)
        for line in (
            f"alloc 300 a# {of}",
            f"alloc 100 b# {of}",
        )
    ]
    freed = [f"free {name}{at}" for at in reversed(range(layers)) for name in "ba"]
    inner = [("forward layer.py:5", CALL), ("forward layer.py:6", CALL)]
    return stacked(trace(*born, *freed, "alloc 5 g phase=backward"), *inner * layers, ())


@pytest.mark.parametrize(
    "of", ["phase=forward category=activation", "phase=backward category=recomputed"], ids=["kept", "at once"]
)
def test_calls_of_a_line_are_recomputed_where_modules_are_not_known(of: str) -> None:
    """The last layer runs while the outputs of the other three are kept: 3 x 100 + 400 of 4 x 400.

    So it is where one checkpoint around all layers recomputes them at once.
    """
    finding = found(loop(layers=4, of=of), "checkpointing")
    assert (finding.bytes, finding.of_bytes) == (1600 - 700, 1600)
    assert finding.subject == "model.py:20 (forward)"
    assert "4 calls" in finding.title


def test_what_outlives_its_backward_is_not_kept_for_it() -> None:
    """300 of each call are freed after the optimizer's step, as variables of the loop are."""
    kept = (
        "alloc 300 a# phase=forward category=activation",
        "alloc 100 b# phase=forward category=activation",
    )
    backward = ("alloc 5 g phase=backward", *(f"free b{at}" for at in range(4)))
    after = ("alloc 7 m phase=optimizer", *(f"free a{at}" for at in range(4)))
    inner = [("forward layer.py:5", CALL), ("forward layer.py:6", CALL)]
    history = stacked(trace(*layers(*kept, count=4), *backward, *after), *inner * 4, (), ())
    assert "by at most 0 B" in why(history, "checkpointing")


def test_what_a_line_calls_is_named_where_stacks_name_it() -> None:
    finding = found(
        loop(layers=4, of="phase=forward category=activation module=layers.#.mlp"), "checkpointing"
    )
    assert finding.title.startswith("Recompute layers.*.mlp, which model.py:20 (forward) calls, in backward")


@pytest.mark.parametrize(
    "passed_on",
    [
        "wrapped_func /lib/transformers/utils/deprecation.py:173",
        "forward /lib/torch/distributed/fsdp/fully_sharded_data_parallel.py:857",
    ],
)
def test_a_line_of_a_library_that_only_passes_calls_on_is_not_to_be_recomputed(passed_on: str) -> None:
    history = loop(layers=4)
    stacks = tuple((*stack[:1], passed_on, *stack[1:]) for stack in history.stacks)
    assert found(replace(history, stacks=stacks), "checkpointing").subject == "model.py:20 (forward)"


def test_without_a_backward_nothing_is_recomputed_in_it() -> None:
    kept = [f"alloc {size} x{size} phase=forward category=activation" for size in (300, 100)]
    history = stacked(trace(*kept), ("forward layer.py:5", CALL), ("forward layer.py:6", CALL))
    assert "has no backward" in why(history, "checkpointing")


def test_a_workspace_from_an_earlier_backward_is_no_backward() -> None:
    kept = layers("alloc 100 x# phase=forward category=activation", count=4)
    called = [(f"forward layer.py:{line}", CALL, "forward model.py:20") for line in (5, 6)]
    backward = ("torch::autograd::generated::AddmmBackward0::apply ??:0",)
    history = stacked(trace("start 50 w", *kept), *called, *called, backward, start=(4,))
    assert "has no backward" in why(history, "checkpointing")


def test_with_stacks_a_peak_without_activations_is_judged() -> None:
    history = trace("alloc 90 w category=parameter", "alloc 5 g phase=backward category=gradient")
    assert "by at most 0 B" in why(stacked(history, MODEL), "checkpointing")


def test_one_call_has_nothing_to_recompute() -> None:
    assert "by at most 0 B" in why(loop(layers=1), "checkpointing")
