"""What views ask of a long window is found by indexes; it equals what a look at every event finds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tb_memplugin import load
from tb_memplugin.analysis import curves
from tb_memplugin.analysis.advice_rules import advice
from tb_memplugin.analysis.allocations import bands, turnover
from tb_memplugin.analysis.allocator import AllocatorHistory, split_moments
from tb_memplugin.analysis.columns import event_cuts
from tb_memplugin.analysis.curves import event_curve
from tb_memplugin.analysis.divisions import By
from tb_memplugin.analysis.layout import Placement
from tb_memplugin.trace import (
    Category,
    Device,
    Kind,
    MemoryTrace,
    Module,
    Phase,
    Step,
    events,
    indexes,
    replay,
    start_state,
)

EVENTS = 6_000
RECORDINGS = sorted(Path(__file__).parents[1].joinpath("data").rglob("*.pickle*"))


def recorded(seed: int) -> MemoryTrace:
    """Blocks that live for some or for thousands of events, on two devices."""
    random = np.random.default_rng(seed)
    is_alloc = random.random(EVENTS) < 0.5
    address = np.where(
        random.random(EVENTS) < 0.9, random.integers(1, 20, EVENTS), random.integers(20, 900, EVENTS)
    )
    return MemoryTrace(
        source="random",
        events=events(
            np.arange(EVENTS) * 3,
            kind=np.where(is_alloc, Kind.ALLOC, Kind.FREE_COMPLETED),
            device=random.integers(0, 2, EVENTS),
            address=address * 512,
            bytes=random.integers(1, 9, EVENTS) * 512,
            category=random.integers(0, len(Category), EVENTS),
            module=random.integers(-1, 40, EVENTS),
            operator=random.integers(-1, 3, EVENTS),
            phase=random.integers(0, len(Phase), EVENTS),
        ),
        start=start_state([512, 1024, 4096], device=[0, 1, 0], address=[512, 1024, 512], module=[3, -1, 4]),
        devices=(Device("cuda:0"), Device("cuda:1")),
        steps=(Step(0, 0, 3 * EVENTS),),
        operators=("aten::a", "aten::b", "aten::c"),
        modules=tuple(Module(f"layers.{row}") for row in range(40)),
    )


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.data())
def test_the_exact_peak_is_on_the_curve_at_every_zoom(seed: int, data: st.DataObject) -> None:
    trace = recorded(seed)
    first = data.draw(st.integers(0, EVENTS - 1))
    end = data.draw(st.integers(first + 1, EVENTS))
    columns = data.draw(st.integers(1, 40))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay, "INDEXED", 0)
        drawn = event_curve(trace, 1, first, end, columns)
        banded = bands(trace, 1, event_cuts(trace, first, end, columns), 5)
        moved = turnover(trace, 1, first, end)
    live = trace.live(1)[first : end + 1]
    assert drawn.peak_bytes == live.max() == drawn.high.max() == moved.highest_bytes
    assert drawn.peak_event == first - 1 + live.argmax() == banded.peak_event == moved.highest_event
    assert drawn.low.min() == live.min()
    assert drawn.stacks.sum(axis=0).tolist() == drawn.high.tolist()
    size, blocks = trace.allocations.bytes, trace.allocations
    born = (blocks.device == 1) & (blocks.born >= first) & (blocks.born < end)
    freed = (blocks.device == 1) & (blocks.freed >= first) & (blocks.freed < end)
    assert (moved.allocated_bytes, moved.allocated) == (size[born].sum(), born.sum())
    assert (moved.freed_bytes, moved.freed) == (size[freed].sum(), freed.sum())
    assert moved.stayed.tolist() == np.flatnonzero(born & (blocks.freed >= end)).tolist()
    for column, at in enumerate(drawn.high.tolist()):
        shown = (banded.first <= column) & (column <= banded.last)
        assert size[banded.rows[shown]].sum() + banded.rest[column] == at


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["category", "phase", "module", "operator"]), st.data())
def test_sums_by_part_are_those_of_the_blocks(seed: int, by: By, data: st.DataObject) -> None:
    trace = recorded(seed)
    first = data.draw(st.integers(0, EVENTS - 1))
    columns = data.draw(st.integers(1, 40))
    drawn = []
    for indexed in (0, 1 << 40):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(curves, "INDEXED", indexed)
            patch.setattr(curves, "WIDE", 0)
            patch.setattr(indexes, "MOST_CELLS", data.draw(st.sampled_from([1, 500, 1 << 22])))
            drawn.append(event_curve(trace, 0, first, EVENTS, columns, by))
        assert drawn[-1].stacks.sum(axis=0).tolist() == drawn[-1].high.tolist()
    assert drawn[0].keys == drawn[1].keys
    assert drawn[0].stacks.tolist() == drawn[1].stacks.tolist()
    assert ("part_sums", 0, by) in vars(trace)["_results"]  # the first one used them


def test_advice_says_the_same_with_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    by_look = advice(recorded(0))
    monkeypatch.setattr(replay, "INDEXED", 0)
    assert advice(recorded(0)) == by_look
    assert {finding.kind for finding in by_look.findings} >= {"kept_gradients", "unused_gradients"}


@pytest.mark.parametrize("path", RECORDINGS, ids=lambda path: path.name)
def test_recordings_say_the_same_with_the_index(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[list[object]] = [[], []]
    for indexed, said in zip((0, 1 << 40), answers, strict=True):
        monkeypatch.setattr(replay, "INDEXED", indexed)
        monkeypatch.setattr(curves, "INDEXED", indexed)
        monkeypatch.setattr(curves, "WIDE", 0)
        trace = load(path)
        count = len(trace.events)
        cuts = event_cuts(trace, count // 4, count, 7)
        for device in range(len(trace.devices)):
            drawn = event_curve(trace, device, count // 4, count, 7)
            reserved = AllocatorHistory(trace, device).curve(cuts)
            alive = [trace.allocations.alive_at(event, device).tolist() for event in range(-1, count, 97)]
            splits = split_moments(Placement(trace, device), cuts)
            by_module = event_curve(trace, device, 0, count, 50, "module")
            said += [by_module.keys, by_module.stacks.tolist()]
            said += [drawn.high.tolist(), drawn.stacks.tolist(), reserved.low.tolist(), alive, splits]
    assert answers[0] == answers[1]
