"""Categories agree with torch's data-flow analysis, but where other evidence shows torch to be wrong."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from tests.record.agreement import THREADS, UNTUNED, Agreement, Clears, Evidence, agreement
from tests.record.untuned import MORE_UNTUNED

ALL = {**UNTUNED, **MORE_UNTUNED}
EXPLAINED = {  # in docs/categories.md: (ours, torch's)
    ("activation", "input"),  # made in a module's forward: an LSTM's first state, a dropout's scalar
    ("activation", "nothing"),  # made in a forward and kept, but not for the autograd graph
    ("activation", "gradient"),  # the seed of a backward
    ("autograd_detail", "nothing"),  # sums of gradients, which autograd makes between two nodes
}


RUNS = [(name, optimizer) for name in ALL for optimizer in ("SGD", "AdamW")]
TUTORIALS = [("after", THREADS), ("first", THREADS)]
HARDEST = ("between", 1)  # old gradients live through the forward, ATen's own convolutions


@cache
def compared(run: tuple[str, str], loop: tuple[Clears, int]) -> Agreement:
    (name, optimizer), (clears, threads) = run, loop
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return agreement(ALL[name](), getattr(torch.optim, optimizer), clears)
    finally:
        torch.set_num_threads(before)


@pytest.fixture(params=[*TUTORIALS, HARDEST], ids=lambda loop: loop[0])
def loop(request) -> tuple[Clears, int]:
    return request.param


@pytest.fixture(params=RUNS, ids="-".join)
def found(request, loop) -> Agreement:
    return compared(request.param, loop)


@pytest.mark.parametrize("loop", TUTORIALS, ids=lambda loop: loop[0])
def test_of_the_bytes_that_torch_gives_a_category_at_most_one_in_twenty_differ(found):
    assert found.of_named >= 0.95, found.differ
    assert found.named_by_torch > found.total / 2  # else the share would say little


def test_of_the_bytes_that_no_evidence_decides_at_most_one_in_twenty_differ(found):
    assert found.of_undecided >= 0.95, found.open


def test_what_differs_and_is_not_decided_is_only_what_the_docs_explain(found):
    assert {(ours, theirs) for ours, theirs, _ in found.open} <= EXPLAINED


def test_nothing_is_unknown(found):
    assert not [ours for ours, *_ in (*found.unnamed, *found.differ) if ours == "unknown"]


def test_the_bytes_are_all_counted_once(found):
    assert found.same + found.torch_wrong.total() + found.open.total() == found.total
    assert found.same + found.differ.total() == found.named_by_torch


def test_a_pointer_taken_while_the_block_lived_decides():
    evidence = Evidence(notes=[(50, {7: "buffer"})])
    assert evidence.against(7, 0, 100, "buffer", "input") == "its pointer"
    assert evidence.against(7, 60, 100, "buffer", "input") is None  # another block at this address
    assert evidence.against(8, 0, 100, "buffer", "input") is None


def test_a_block_that_is_no_parameters_gradient_at_any_time_is_none():
    evidence = Evidence(notes=[(50, {7: "gradient"})])
    assert evidence.against(8, 0, 100, "autograd_detail", "gradient") == "it is no gradient: no pointer"


def test_evidence_never_speaks_for_ours_where_it_speaks_for_torchs():
    evidence = Evidence(notes=[(50, {7: "gradient"})])
    assert evidence.against(7, 0, 100, "autograd_detail", "gradient") is None
    assert evidence.against(7, 0, 100, "activation", "gradient") is None


def test_a_life_within_one_operator_is_a_temporarys():
    evidence = Evidence(spans=[(10, 20)])
    assert evidence.against(7, 12, 18, "temporary", "parameter")
    assert evidence.against(7, 12, 21, "temporary", "input") is None
