"""Growth of a program whose steps nothing marks: calls of its model, by stacks, on small histories."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tb_memplugin.analysis import advice
from tb_memplugin.analysis.leak_sites import call_bounds
from tb_memplugin.trace import Kind, MemoryTrace
from tests.traces import trace

CALL = ("_call_impl torch/nn/modules/module.py:1790", "serve server.py:8")
EMBED, LAYER, HEAD = (
    (
        f"forward model.py:{line}",
        "_call_impl torch/nn/modules/module.py:1790",
        f"forward net.py:{call}",
        *CALL,
    )
    for line, call in ((3, 20), (5, 22), (9, 24))
)


def served(requests: int, *, kept: bool = False, layers_freed: bool = True) -> MemoryTrace:
    """Each request: 100 of an embedding, three layers of 100, and 40 of the head, which `kept` keeps."""
    lines, stacks = [], []
    for n in range(requests):
        lines += [f"alloc 100 e{n}", *(f"alloc 100 l{n}.{layer}" for layer in range(3)), f"alloc 40 h{n}"]
        stacks += [EMBED, LAYER, LAYER, LAYER, HEAD]
        lines += [f"free {x}" for x in (f"e{n}", *(f"l{n}.{layer}" for layer in range(3))) if layers_freed]
        lines += [] if kept else [f"free h{n}"]
    history = trace("start 50 w", *lines)
    rows = np.full(len(history.events), -1, np.int32)
    rows[history.events.kind == Kind.ALLOC] = [(EMBED, LAYER, HEAD).index(stack) for stack in stacks]
    return replace(history, events=replace(history.events, stack=rows), stacks=(EMBED, LAYER, HEAD))


def test_a_call_begins_where_the_first_layer_runs_again_if_all_of_a_model_is_a_loop_over_layers() -> None:
    """Three layers by one stack: 100 each, of which a hook keeps 10. A call has nine events."""
    lines = [
        line.replace("#", f"{call}.{layer}") + f" module=layers.{layer}" * line.startswith("alloc")
        for call in range(6)
        for layer in range(3)
        for line in ("alloc 100 a#", "alloc 10 kept#", "free a#")
    ]
    history = trace("start 50 w", *lines)
    rows = np.where(history.events.kind == Kind.ALLOC, 0, -1).astype(np.int32)
    history = replace(history, events=replace(history.events, stack=rows), stacks=(LAYER,))
    assert call_bounds(history, 0).tolist() == [0, 9, 18, 27, 36, 45]
    (growth,) = [one for one in advice(history).findings if one.kind == "growth"]
    assert growth.bytes == 30


def test_a_call_begins_where_the_first_stack_that_is_not_in_a_loop_allocates_again() -> None:
    """A request has ten events; the layers' stack allocates three times in each."""
    assert call_bounds(served(6), 0).tolist() == [0, 10, 20, 30, 40, 50]


def test_results_that_a_server_keeps_grow_by_their_size() -> None:
    (finding,) = (one for one in advice(served(9, kept=True)).findings if one.kind == "growth")
    assert (finding.level, finding.bytes, finding.subject) == ("problem", 40, "model.py:9 (forward)")


def test_a_validation_whose_losses_keep_their_graphs_grows_by_them() -> None:
    """Six calls of 100 and 40 bytes that free nothing, each with a loss of 4, by one stack each."""
    stacks = (EMBED, HEAD, ("cross_entropy torch/nn/functional.py:9", "serve server.py:9"))
    sizes = (100, 40, 4)
    history = trace("start 50 w", *(f"alloc {size} {size}.{n}" for n in range(6) for size in sizes))
    rows = np.tile(np.arange(3, dtype=np.int32), 6)
    history = replace(history, events=replace(history.events, stack=rows), stacks=stacks)
    (finding,) = (one for one in advice(history).findings if one.kind == "growth")
    assert (finding.bytes, finding.subject) == (144, "model.py:3 (forward)")


def test_layers_of_one_call_that_keep_their_caches_are_no_growth() -> None:
    """An encoder runs once, without a graph: each layer frees 100 and keeps 40 of keys and values."""
    lines = [
        "alloc 100 e",
        *(f"{what}{n}" for n in range(9) for what in ("alloc 100 l", "alloc 40 c", "free l")),
    ]
    cache = ("forward model.py:6", *LAYER[1:])
    history = trace("start 50 w", *lines)
    rows = np.full(len(history.events), -1, np.int32)
    rows[history.events.kind == Kind.ALLOC] = [0, *(1, 2) * 9]
    history = replace(history, events=replace(history.events, stack=rows), stacks=(EMBED, LAYER, cache))
    assert call_bounds(history, 0).tolist() == []


@pytest.mark.parametrize(
    ("history", "why"),
    [
        (served(9), "No place grew"),
        (served(4, kept=True), "needs 3 whole steps"),  # three whole calls
        (served(9, layers_freed=False), "needs 3 whole steps"),  # as activations kept for a backward
        (trace(*(f"alloc 10 x{n}" for n in range(9))), "needs 3 whole steps"),  # no stacks
    ],
)
def test_what_is_no_growth_of_calls(history: MemoryTrace, why: str) -> None:
    (judgement,) = (one for one in advice(history).judgements if one.kind == "growth")
    assert judgement.verdict != "found"
    assert why in judgement.why
