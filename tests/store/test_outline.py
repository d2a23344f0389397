from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tb_memplugin.analysis.divisions import DIVISIONS
from tb_memplugin.store.outline import whole_summaries
from tb_memplugin.store.reader import full_summary, peak_parts, read_recordings
from tb_memplugin.store.summary import Window, WindowSummaries
from tb_memplugin.store.writer import RunWriter
from tests.traces import trace

LINES = (
    "start 400 w category=parameter module=layer device=cuda:0",
    "step 5",
    "alloc 100 a module=layer operator=aten::mm phase=forward device=cuda:0 reserved=1024",
    "free a",
    "step 6",
    "alloc 30 b device=cuda:0 reserved=2048",
    "alloc 5 host device=cpu",
    "free b",
)
WINDOW = Window("rank0", "abc", 0, "window-000000.mem")


def outlined(row):
    return WindowSummaries(trace(*LINES), WINDOW).outline(row)


def test_a_window_with_many_short_steps_has_whole_summaries_of_the_first(tmp_path, monkeypatch):
    monkeypatch.setattr("tb_memplugin.store.outline.EVENTS_PER_SUMMARY", 3)
    made = []
    whole = WindowSummaries.summary

    def counted(self, row, limits):
        made.append(row)
        return whole(self, row, limits)

    monkeypatch.setattr(WindowSummaries, "summary", counted)
    lines = [line for number in range(7) for line in (f"step {number}", f"alloc 8 b{number}")]
    RunWriter(str(tmp_path), "rank0").write(trace(*lines))
    assert made == [0, 1]
    steps = read_recordings(str(tmp_path)).steps
    assert [step.summary().folded for step in steps] == [False] * 2 + [True] * 5


def test_a_reader_makes_the_rest_from_the_side_file(tmp_path, monkeypatch):
    monkeypatch.setattr("tb_memplugin.store.outline.MOST_WHOLE", 1)
    RunWriter(str(tmp_path), "rank0").write(trace(*LINES))
    step = read_recordings(str(tmp_path)).steps[1]
    assert step.summary().folded
    assert not full_summary(step).folded
    assert list(full_summary(step).devices[0].peak.by_category.keys) == ["parameter", "unknown"]


def test_an_outline_has_the_steps_figures():
    whole, outline = WindowSummaries(trace(*LINES), WINDOW).summary(1), outlined(1)
    assert outline.metadata == whole.metadata
    for one, other in zip(outline.devices, whole.devices, strict=True):
        assert (one.stats, one.name, one.capacity_bytes) == (other.stats, other.name, other.capacity_bytes)
        assert (one.peak.bytes, one.peak.event) == (other.peak.bytes, other.peak.event)
        low, high = np.cumsum(other.curve.low), np.cumsum(other.curve.high)
        assert (list(one.curve.low), list(one.curve.high)) == ([low.min()], [high.max()])
    assert list(outline.devices[0].curve.reserved) == [2048]


@pytest.mark.parametrize("by", DIVISIONS)
def test_an_outlines_parts_are_one_that_is_the_whole_and_says_that_it_is_not_known(by):
    summary = outlined(1)
    (part,) = peak_parts(summary, summary.devices[0], by)
    assert (part.bytes, part.count) == (430, 2)
    assert part.key in ("unknown", "(not known)", "(not named)")


def test_a_full_summary_read_from_the_side_file_is_the_one_that_would_have_been_written(tmp_path):
    recorded = trace(*LINES)
    RunWriter(str(tmp_path), "rank0").write(recorded)
    step = read_recordings(str(tmp_path)).steps[1]
    written = Window("rank0", step.metadata.writer_id, 0, step.metadata.side_file)
    assert full_summary(step) == WindowSummaries(recorded, written).summary(1)


@pytest.mark.parametrize(
    ("events", "devices", "whole"),
    [(0, 1, 1), (3_999, 1, 1), (4_000, 1, 2), (4_000, 2, 1), (1 << 21, 1, 500)],
)
def test_the_number_of_whole_summaries_follows_the_size_of_the_window(events, devices, whole):
    recorded: Any = SimpleNamespace(events=range(events), devices=range(devices))
    assert whole_summaries(recorded) == whole
