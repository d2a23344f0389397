"""What holds the memory that outlives a window."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tb_memplugin.analysis.advice_rules import advice
from tb_memplugin.record import why_alive
from tb_memplugin.record.profiler.trace import trace_from_profile
from tb_memplugin.record.profiler.window import WindowRecorder, watch
from tb_memplugin.record.why_alive import with_holders
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.labels import HELD_BY_A_LOCAL

KEPT: list[Any] = []
HERE = f"{__name__}.KEPT"


class Node:
    """An object with attributes."""


@pytest.fixture(autouse=True)
def _nothing_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(why_alive, "LONGEST_NS", 20_000_000_000)  # the heap of the tests is large
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    KEPT.clear()


def recorded(run: Any) -> MemoryTrace:
    """The trace of a run; what it returns is alive until it was searched."""
    recorder, made = WindowRecorder({}, [], finds_all=False), []
    watch(recorder)

    def ready(prof: profile) -> None:
        window = recorder.take()
        assert window is not None
        made.append(with_holders(trace_from_profile(prof, window)))

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, on_trace_ready=ready):
        alive = run()
    del alive
    return made[0]


def labels(trace: MemoryTrace) -> dict[int, str]:
    """The label of each block that outlives the window, by its bytes."""
    blocks = trace.allocations
    return {
        int(blocks.bytes[row]): trace.labels[blocks.label[row]] if blocks.label[row] >= 0 else ""
        for row in range(len(blocks))
        if blocks.freed[row] >= len(trace.events)
    }


def cycle(numbers: int) -> torch.Tensor:
    """Leave two objects that refer to each other, and a tensor of one of them. Returns another tensor."""
    a, b = Node(), Node()
    a.other, b.other, a.tensor = b, a, torch.ones(numbers)  # type: ignore[attr-defined]
    return torch.ones(100)


def test_the_chain_goes_from_a_modules_variable_to_the_tensor() -> None:
    def run() -> None:
        node = Node()
        node.history = {"out": [torch.ones(500)]}  # type: ignore[attr-defined]
        KEPT.append(node)

    assert labels(recorded(run)) == {2000: f"held by {HERE}[0].history['out'][0]"}


def test_what_autograd_saved_is_held_by_the_result_and_a_node() -> None:
    def run() -> None:
        weight = torch.ones(30, requires_grad=True)
        KEPT.append((torch.ones(30) * 2 * weight).exp().sum())

    found = set(recorded(run).labels)
    assert f"held by {HERE}[0] → ExpBackward0" in found
    assert f"held by {HERE}[0] → MulBackward0" in found


def test_a_closure_holds_what_it_uses() -> None:
    def run() -> None:
        inside = torch.ones(900)
        KEPT.append(lambda: inside)

    assert labels(recorded(run)) == {3600: f"held by {HERE}[0] → closure"}


def test_a_default_of_a_parameter_is_none_of_a_closure() -> None:
    def run() -> None:
        tensor = torch.ones(900)
        KEPT.append(lambda held=tensor: held)

    assert labels(recorded(run)) == {3600: f"held by {HERE}[0].__defaults__[0]"}


def test_a_block_without_a_tensor_of_python_is_of_cpp() -> None:
    """The constant of a script has none, nor has an address that no storage has."""
    assert why_alive._chains({("cpu", 8): 3}) == ({3: HELD_BY_A_LOCAL}, True)


def test_a_local_variable_is_no_cycle() -> None:
    assert labels(recorded(lambda: torch.ones(800))) == {3200: "held by a local variable, or C++"}


def test_a_reference_cycle_is_a_finding_with_its_bytes() -> None:
    trace = recorded(lambda: cycle(700))
    assert labels(trace) == {
        2800: "held by a reference cycle: Node → Node → Tensor",
        400: "held by a local variable, or C++",
    }
    (finding,) = [found for found in advice(trace).findings if found.kind == "reference_cycles"]
    assert (finding.bytes, finding.level) == (2800, "problem")
    assert [(row.what, row.bytes) for row in finding.evidence] == [("Node → Node → Tensor", 2800)]


def test_nothing_is_kept_alive_and_the_cycle_can_be_collected() -> None:
    recorded(lambda: cycle(700))
    before = sum(type(thing) is Node for thing in gc.get_objects())
    assert before == 2
    gc.collect()
    assert not any(type(thing) is Node for thing in gc.get_objects())


def test_a_search_that_takes_too_long_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(why_alive, "LONGEST_NS", 0)
    trace = recorded(lambda: cycle(700))
    assert labels(trace) == {2800: "", 400: ""}
    told = [verdict.verdict for verdict in advice(trace).judgements if verdict.kind == "reference_cycles"]
    assert told == ["not judged"]


def test_where_nothing_outlives_the_window_there_is_no_cycle() -> None:
    trace = recorded(lambda: torch.ones(10).sum().item())
    told = [verdict.verdict for verdict in advice(trace).judgements if verdict.kind == "reference_cycles"]
    assert told == ["fine"]


def test_what_is_small_beside_the_live_bytes_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(why_alive, "LEAST_SHARE", 1.1)
    monkeypatch.setattr(why_alive, "Search", None)
    assert labels(recorded(lambda: cycle(700))) == {2800: "", 400: ""}
