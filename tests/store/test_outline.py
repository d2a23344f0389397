import numpy as np
import pytest

from tb_memplugin.analysis.divisions import DIVISIONS
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
    summaries = WindowSummaries(trace(*LINES), WINDOW)
    return summaries.outline(row, summaries.metadata(row))


def test_a_window_is_written_without_a_breakdown_which_readers_make_later(tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(WindowSummaries, "summary", None)
        RunWriter(str(tmp_path), "rank0").write(trace(*LINES))
    first, second = read_recordings(str(tmp_path)).steps
    assert first.summary().folded
    assert second.summary().folded
    assert not full_summary(second).folded
    assert list(full_summary(second).devices[0].peak.by_category.keys) == ["parameter", "unknown"]


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
