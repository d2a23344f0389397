"""What the counters of others say, by source: the allocator beside a profile, a snapshot, a Kineto trace."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tb_memplugin.analysis.account import account_line, accounts
from tb_memplugin.read.snapshot.trace import trace_from_snapshot
from tb_memplugin.record.history.merge import merge_snapshot
from tb_memplugin.record.modules import ModuleNames
from tb_memplugin.record.profiler.counters import counter_readings
from tb_memplugin.record.profiler.window import Window
from tb_memplugin.record.whole_device import card
from tb_memplugin.record.whole_device.card import Level, highest_between
from tb_memplugin.trace import Cause, Counter, CounterReading, Moment
from tests.read.kineto.test_trace import loaded, memory
from tests.record.history.test_merge import PROFILE, STORY, history
from tests.record.profiler.test_beside_counters import events
from tests.snapshots import block, entries, segment, snapshot
from tests.traces import trace

CUDA = ("cuda:0", Counter.ALLOCATED)


def window(start: Level, stop: Level) -> Window:
    return Window(0, 0, ModuleNames(), levels_at_start={CUDA: start}, levels_at_stop={CUDA: stop})


def read(of_window, profile):
    readings = counter_readings(of_window, profile, ("cuda:0",), {}, 0)
    assert [(one.device, one.counter) for one in readings] == [(0, Counter.ALLOCATED)] * 3
    return [(one.bytes, one.at_least) for one in readings]


def test_the_highest_counter_of_an_event_is_the_peak_where_the_events_explain_all_changes():
    """1,000 bytes at the start; the program once had 9,000."""
    profile = events("cuda:0", (512, 1512), (1024, 2536), (-512, 2024))
    quiet = window(Level(1000, 9000), Level(2024, 9000))
    assert read(quiet, profile) == [(1000, False), (2536, False), (2024, False)]


def test_a_new_highest_value_is_the_windows_own():
    """Another thread had 3,000 bytes more for a while."""
    profile = events("cuda:0", (512, 4512), (-512, 1000))
    assert read(window(Level(1000, 2000), Level(1000, 4600)), profile)[1] == (4600, False)


def test_where_others_allocate_too_the_peak_is_a_lower_bound():
    profile = events("cuda:0", (512, 1512), (512, 4072), (512, 1536))
    assert read(window(Level(1000, 9000), Level(1536, 9000)), profile)[1] == (4072, True)


def test_a_highest_value_that_the_program_reset_in_the_window_is_none():
    assert highest_between(Level(1000, 9000), Level(1500, 1500)) == (1500, False)


def test_a_device_without_counters_has_only_what_was_seen():
    readings = counter_readings(
        Window(0, 0, ModuleNames()), events("cpu", (512, 512)), ("cpu",), {"cpu": 70}, 0
    )
    assert [(one.counter, one.bytes, one.causes) for one in readings] == [
        (Counter.SEEN, None, ()),
        (Counter.SEEN, None, ((Cause.NOT_TRACED, 70),)),
        (Counter.SEEN, None, ((Cause.NOT_TRACED, 70),)),
    ]


def test_levels_are_read_of_each_device_in_use(monkeypatch):
    stats = {"allocated_bytes": {"all": {"current": 5, "peak": 9}}, "segment": {}}
    monkeypatch.setattr(torch._C, "_cuda_memoryStats", lambda index: stats, raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert card.allocator_levels() == {
        ("cuda:0", Counter.ALLOCATED): Level(5, 9),
        ("cuda:1", Counter.ALLOCATED): Level(5, 9),
    }
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert card.allocator_levels() == {}


@pytest.mark.parametrize(("counted", "missing"), [(5, 0), (6, 1), (None, None)])
def test_a_snapshot_is_held_against_what_its_segments_count_at_the_end(counted, missing):
    final = segment(block(1000, 5))
    if counted is not None:
        final["requested_size"] = counted
    (account,) = accounts(trace_from_snapshot(snapshot([final], entries("alloc 1000 5")), "x"), 0)
    assert (account.moment, account.counted, account.missing) == (Moment.END, 5, missing)


def test_a_merged_device_is_held_against_requested_bytes():
    """The profile has rounded bytes, and of the allocator both; the history has requested ones."""
    readings = [
        CounterReading(0, Moment.END, counter, size)
        for counter, size in ((Counter.ALLOCATED, 512 + 1024), (Counter.REQUESTED, 400 + 900))
    ]
    profile = replace(trace(*PROFILE), counters=tuple(readings))
    assert account_line(accounts(profile, 0)).level == "exact"
    merged = merge_snapshot(profile, history(*STORY))
    (account,) = accounts(merged, merged.device_row("cuda:0"))
    assert (account.counter, account.counted, account.missing) == (Counter.REQUESTED, 1300, 0)


def test_a_kineto_trace_is_held_against_the_counter_in_its_events():
    """The counter is 3 bytes higher than the events explain, from the second event on."""
    gpu = {"Device Type": 1, "Device Id": 0}
    found = accounts(loaded(memory("1 10 10 110", **gpu), memory("2 20 5 118", **gpu)), 0)
    assert [(one.counted, one.allocator) for one in found] == [(100, 100), (115, 118), (115, 118)]


def test_the_cpus_counter_in_a_kineto_trace_proves_nothing():
    assert account_line(accounts(loaded(memory("1 10 10 110")), 0)).level == "not_known"


def test_what_python_has_at_the_end_and_the_window_has_not_is_missing_there():
    """70 bytes were in use, 90 are alive at the end, perhaps the 70 among them: at least 90 are missing."""
    readings = counter_readings(
        Window(0, 0, ModuleNames()), events("cpu", (512, 512)), ("cpu",), {"cpu": 70}, 90
    )
    assert [one.causes for one in readings] == [(), ((Cause.NOT_TRACED, 70),), ((Cause.UNSEEN, 90),)]
