"""Lines from an allocator's history: a stand-in keeps it, with the frames that torch would write."""

from __future__ import annotations

import time

import pytest
import torch

from tb_memplugin.analysis.lines import line_table
from tb_memplugin.errors import MemPluginError
from tb_memplugin.record.history.allocators import HistorySwitch
from tb_memplugin.record.lines import HistoryLines, recording_device
from tests.allocators import StandIn
from tests.snapshots import block, segment

FORWARD = {"name": "forward", "filename": "/home/me/model.py", "line": 12}


def recording(gpu, peak=0, max_events=100):
    levels = iter([(0, 0), (0, peak)])
    return HistoryLines(
        torch.device("cuda", 0),
        max_events,
        allocator=gpu.as_allocator(),
        levels=lambda: next(levels),
        switch=HistorySwitch(),
    )


def allocate(gpu, address, size, **fields):
    gpu.note("alloc", address, size, time.time_ns() // 1000)
    gpu.entries[-1].update(fields)
    gpu.segments.append(segment(block(address, size), total=1 << 16))


@pytest.fixture
def gpu():
    return StandIn(segments=[segment(block(0x1000, 400), total=1 << 16)])


def test_lines_are_the_historys(gpu):
    made = recording(gpu)
    made.begin()
    allocate(gpu, 0x100000, 1000, frames=[FORWARD])
    allocate(gpu, 0x200000, 500, frames=[FORWARD])
    recorded = made.end()
    assert not gpu.recording
    assert recorded.total_allocated == {0: 1500}
    assert [(row.key, row.bytes) for row in line_table(recorded.trace, 0)] == [
        ("/home/me/model.py:12 (forward)", 1500)
    ]
    assert recorded.trace.source == "LineTracer"


def test_a_backward_without_python_goes_by_the_forward_call_where_torch_wrote_it(gpu):
    made = recording(gpu)
    made.begin()
    allocate(gpu, 0x100000, 1000, frames=[], forward_frames=["forward /home/me/model.py:12"])
    assert line_table(made.end().trace, 0)[0].key == "/home/me/model.py:12 (forward)"


def test_a_peak_that_the_history_overwrote_is_told(gpu):
    made = recording(gpu, peak=9_000, max_events=1)
    made.begin()
    allocate(gpu, 0x100000, 1000, frames=[FORWARD])
    notes = made.end().trace.notes
    assert any("counted a peak of 9,000 bytes" in note and "1,400 bytes" in note for note in notes)


def test_a_device_that_is_not_in_use_is_refused():
    with pytest.raises(MemPluginError, match="No cuda device is in use yet"):
        recording(StandIn(in_use=False)).begin()


def test_without_an_accelerator_in_use_it_is_the_cpu():
    assert recording_device(torch.device("cuda", 1)) == torch.device("cuda", 1)
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        assert recording_device(None) == torch.device("cpu")
