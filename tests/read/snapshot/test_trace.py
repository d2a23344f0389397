"""Small snapshots, a dict in a line or two, with values that a person can work out."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest

from tb_memplugin.analysis.allocator import levels, pools
from tb_memplugin.analysis.moments import peak
from tb_memplugin.loading import load
from tb_memplugin.read.snapshot.trace import trace_from_snapshot
from tb_memplugin.trace import Category, Kind, Phase
from tb_memplugin.trace.replay import Allocations, pair
from tests.snapshots import block, entries, load_snapshot, segment, snapshot


def test_what_was_alive_before_the_window_and_freed_in_it_is_known() -> None:
    trace = trace_from_snapshot(
        snapshot(
            [segment(block(5000, 30))],
            entries(
                "alloc 1000 100",
                "free_requested 3000 70",
                "free_completed 3000 70",
                "free_requested 1000 100",
                "free_completed 1000 100",
            ),
        ),
        "x",
    )
    assert trace.live(0).tolist() == [100, 200, 200, 130, 130, 30]
    assert sorted(zip(trace.start.address.tolist(), trace.start.bytes.tolist(), strict=True)) == [
        (3000, 70),
        (5000, 30),
    ]
    assert {trace.modules[row].key for row in trace.start.module} == {"(not named)"}
    assert set(trace.start.category.tolist()) == {Category.UNKNOWN}
    assert set(trace.allocations.phase[:2].tolist()) == {Phase.BEFORE}
    assert trace.notes == ()
    assert trace.events.time_ns.tolist() == [0, 10_000, 20_000, 30_000, 40_000]
    assert [(step.number, step.start_ns, step.end_ns) for step in trace.steps] == [(0, 0, 40_001)]


def test_a_block_is_live_until_its_free_is_completed() -> None:
    pending = block(1000, 100, "active_pending_free")
    trace = trace_from_snapshot(
        snapshot([segment(pending)], entries("alloc 1000 100", "free_requested 1000 100")), "x"
    )
    assert trace.live(0).tolist() == [0, 100, 100]
    assert trace.events.kind.tolist() == [Kind.ALLOC, Kind.FREE_REQUESTED]
    assert trace.notes == ()


def test_a_free_that_the_window_only_completes_was_requested_before_it() -> None:
    trace = trace_from_snapshot(
        snapshot([segment(block(2000, 7))], entries("alloc 2000 7", "free_completed 1000 100")), "x"
    )
    assert levels(trace, 0).pending.tolist() == [100, 100, 0]


def test_frees_of_a_recording_that_skips_requests_are_never_pending() -> None:
    lines = ("free_completed 1000 100", "alloc 1000 7", "free_completed 1000 7")
    trace = trace_from_snapshot(snapshot([segment(block(1000, 0, "inactive"))], entries(*lines)), "x")
    assert levels(trace, 0).pending.tolist() == [0, 0, 0, 0]


def test_requested_frees_are_completed_ones_in_a_recording_that_skips_those() -> None:
    held = segment(block(1000, 100, "active_pending_free"), block(1512, 0, "inactive", 1536))
    lines = ("alloc 2000 7", "free_requested 2000 7", "free_requested 1000 100", "alloc 2000 9")
    trace = trace_from_snapshot(snapshot([held], entries(*lines, "free_requested 2000 9")), "x")
    assert trace.live(0).tolist() == [100, 107, 100, 100, 109, 100]
    assert levels(trace, 0).pending.tolist() == [0, 0, 0, 100, 100, 100]
    assert trace.notes == (
        "cuda:0: 2 frees (16 bytes) were requested, and the snapshot has no completed frees (skip_actions); "
        "they are taken as completed at once.",
    )


def test_frees_without_any_allocation_are_told() -> None:
    trace = trace_from_snapshot(snapshot([segment(block(2000, 7))], entries("free_completed 1000 100")), "x")
    assert trace.live(0).tolist() == [107, 7]
    assert trace.notes == (
        "cuda:0: the snapshot has frees but no allocations. If skip_actions left them out, what was "
        "allocated after the first entry is shown as if it had been there before: up to 107 bytes.",
    )


def test_an_oom_changes_nothing_and_is_told() -> None:
    trace = trace_from_snapshot(
        snapshot([segment(block(1000, 100))], entries("alloc 1000 100", "oom 64 4096")), "x"
    )
    assert trace.live(0).tolist() == [0, 100, 100]
    assert (trace.events.kind[1], trace.events.bytes[1], trace.events.address[1]) == (Kind.OOM, 4096, 0)
    assert trace.notes == (
        "cuda:0: out of memory at entry 1: 4,096 bytes requested with 64 bytes free on the device.",
    )
    (note,) = trace.notes
    assert (note.code, note.bytes, note.device) == ("out_of_memory", 4096, "cuda:0")


def test_segments_and_maps_both_move_the_reserve() -> None:
    trace = trace_from_snapshot(
        snapshot(
            [segment(block(1000, 0, "inactive"), total=700)],
            entries(
                "segment_free 9000 50",
                "segment_map 1000 600",
                "segment_alloc 7000 200",
                "segment_map 2000 400",
                "segment_unmap 2000 300",
                "segment_free 7000 200",
                "snapshot 0 0",
            ),
        ),
        "x",
    )
    assert trace.devices[0].reserved_at_start == 50
    assert trace.events.reserved.tolist() == [0, 600, 800, 1200, 900, 700, 700]
    assert trace.live(0).tolist() == [0] * 8


def test_devices_are_merged_by_time_and_never_mixed() -> None:
    trace = trace_from_snapshot(
        snapshot(
            [segment(block(1000, 100)), segment(block(1000, 7), total=512, device=2)],
            entries("alloc 1000 100 10", "snapshot 0 0 30"),
            [],
            entries("alloc 1000 7 20", "alloc 2000 5 40", "free_completed 2000 5 50"),
        ),
        "x",
        "xpu",
    )
    assert [device.name for device in trace.devices] == ["xpu:0", "xpu:2"]
    assert trace.events.device.tolist() == [0, 1, 0, 1, 1]
    assert trace.live(0).tolist() == [0, 100, 100, 100, 100, 100]
    assert trace.live(1).tolist() == [0, 0, 7, 7, 12, 7]
    assert trace.events.reserved.tolist() == [2048, 512, 2048, 512, 512]


def test_a_device_that_only_saw_that_a_snapshot_was_taken_is_left_out() -> None:
    """torch writes that mark for all devices of the machine, also for those that the process never used."""
    marks = [entries("snapshot 0 0") for _ in range(3)]
    marks[1] += entries("alloc 1000 100")
    trace = trace_from_snapshot(snapshot([segment(block(1000, 100), device=1)], *marks), "x")
    assert [device.name for device in trace.devices] == ["cuda:1"]
    unused = trace_from_snapshot(snapshot([], *[entries("snapshot 0 0")] * 2), "x")
    assert [device.name for device in unused.devices] == ["cuda:0", "cuda:1"]


def test_stacks_and_metadata_are_tables() -> None:
    written = entries("alloc 1000 1", "alloc 2000 2", "alloc 3000 3", "alloc 4000 4")
    frames = [
        {"name": "f", "filename": "C:\\run\\a.py", "line": 3},
        {"name": "main", "filename": "??", "line": 0},
    ]
    written[0]["frames"], written[1]["frames"], written[2]["frames"] = (
        frames,
        copy.deepcopy(frames),
        frames[1:],
    )
    written[1]["user_metadata"], written[2]["user_metadata"] = "layer.0", ""
    blocks = [block(1000 * n, n) for n in (1, 2, 3, 4)]
    trace = trace_from_snapshot(snapshot([segment(*blocks)], written), "x")
    assert trace.stacks == (("f C:\\run\\a.py:3", "main ??:0"), ("main ??:0",))
    assert trace.events.stack.tolist() == [0, 0, 1, -1]
    assert (trace.labels, trace.events.label.tolist()) == (("layer.0",), [-1, 0, -1, -1])


def test_without_times_the_index_stands_for_them() -> None:
    written = entries("alloc 1000 1", "free_completed 1000 1", "snapshot 0 0")
    for entry in written:
        del entry["time_us"]
    trace = trace_from_snapshot(snapshot([], written), "x")
    assert trace.events.time_ns.tolist() == [0, 1000, 2000]
    assert "tells no times" in trace.notes[0]
    assert (trace.notes[0].code, trace.notes[0].device) == ("no_times", "cuda:0")


def test_an_entry_without_a_time_takes_the_one_before_and_at_the_beginning_the_first_told() -> None:
    lines = "alloc 1000 1", "free_completed 1000 1", "snapshot 0 0 70", "snapshot 0 0", "snapshot 0 0 60"
    written = entries(*lines)
    for row in (0, 1, 3):
        del written[row]["time_us"]
    trace = trace_from_snapshot(snapshot([], written), "x")
    assert trace.events.time_ns.tolist() == [70_000] * 5
    assert trace.notes[0].startswith("cuda:0: 3 entries have no time")
    assert trace.notes[1].startswith("cuda:0: 1 entries are earlier")


def test_legacy_blocks_lie_one_behind_the_other_and_history_has_the_request() -> None:
    blocks = [
        {"size": 512, "state": "inactive"},
        {
            "size": 1024,
            "state": "active_allocated",
            "history": [
                {"addr": 1512, "real_size": 900, "frames": []},
                {"addr": 1512, "real_size": 12, "frames": []},
            ],
        },
        {"size": 512, "state": "active_allocated"},
    ]
    trace = trace_from_snapshot([segment(*blocks)], "x")
    assert trace.start.address.tolist() == [1512, 2536]
    assert trace.start.bytes.tolist() == [900, 512]
    assert trace.notes == (
        "The snapshot has no trace, only the final state of 1,412 bytes, so nothing changes over time.",
        "cuda:0: 1 live blocks have no requested size; their rounded size is used (512 bytes).",
    )
    assert peak(trace).bytes == 1412


@pytest.mark.parametrize("protocol", range(2, 6))
def test_every_protocol_loads(protocol: int, tmp_path: Path) -> None:
    path = tmp_path / "a.pickle"
    path.write_bytes(pickle.dumps(snapshot([segment(block(1000, 100))], entries("alloc 1000 100")), protocol))
    assert load_snapshot(path).live(0).tolist() == [0, 100]


def test_addresses_above_the_half_are_the_same_signed_or_not() -> None:
    high = 0xFF00_0000_0020_0000
    trace = trace_from_snapshot(
        snapshot(
            [segment(block(high, 100))],
            entries(
                f"alloc {high - (1 << 64)} 100", f"alloc {high + 512} 5", f"free_completed {high + 512} 5"
            ),
        ),
        "x",
    )
    assert trace.live(0).tolist() == [0, 100, 105, 100]
    assert trace.notes == ()


def test_more_live_than_reserved_is_told_where_no_entry_says_how_the_reserve_changed() -> None:
    lines = ("alloc 1000 3000", "free_requested 1000 3000", "free_completed 1000 3000")
    notes = trace_from_snapshot(
        snapshot([segment(block(1000, 0, "inactive", 2048))], entries(*lines)), "x"
    ).notes
    assert notes == (
        "cuda:0: after 2 entries, more is live than reserved, by up to 952 bytes: no entry says how the "
        "reserved memory changed.",
    )


def test_the_categories_of_a_snapshot_made_from_a_profile_are_read() -> None:
    written = entries("alloc 1000 5", "alloc 2000 6", "alloc 3000 7")
    for entry, category in zip(written, ("gradient", "autograd_detail", "unknown"), strict=True):
        entry["category"] = category
    trace = trace_from_snapshot(
        snapshot([segment(*(block(1000 * row, 4 + row) for row in (1, 2, 3)))], written), "x"
    )
    assert trace.events.category.tolist() == [Category.GRADIENT, Category.AUTOGRAD_DETAIL, Category.UNKNOWN]


def test_a_snapshot_without_segments_shows_what_its_entries_say_and_what_is_missing() -> None:
    lines = ("segment_alloc 1000 4096", "alloc 1000 100", "free_requested 3000 70", "free_completed 3000 70")
    trace = load({"device_traces": [entries(*lines)]})
    assert trace.live(0).tolist() == [70, 70, 170, 170, 100]
    assert trace.reserved(0) is None
    assert [state.reserved_bytes for state in pools(trace, 0, 3)] == [None]
    assert trace.notes == (
        "cuda:0: the snapshot has no segments, which contain the final state. Of what was alive before the "
        "first entry, only the 70 bytes that an entry frees are counted: the rest is missing from every "
        "level. Reserved memory is not known.",
    )


def test_pinned_memory_whose_segments_are_missing_has_no_known_reserve() -> None:
    written = {"segments": [], "host_traces": entries("segment_alloc 1000 4096", "segment_free 1000 4096")}
    whole = trace_from_snapshot({**written, "host_segments": []}, "x")
    level = whole.reserved(0)
    assert level is not None
    assert level.tolist() == [0, 4096, 0]
    assert whole.notes == ()
    part = trace_from_snapshot(written, "x")
    assert part.reserved(0) is None
    assert [note.startswith("pinned: the snapshot has no segments") for note in part.notes] == [True]


@pytest.mark.parametrize(
    ("settings", "expandable", "expected"),
    [
        ({"roundup_power2_divisions": {"256": 0, "512": 1}}, False, [1024, -1, 1024]),
        ({"roundup_power2_divisions": {"256": 0, "512": 1}}, True, [1024, 1_049_088, 1024]),
        ({"roundup_power2_divisions": {"256": 0, "512": 8}}, True, [-1, -1, 1024]),
        ({}, True, [-1, -1, 1024]),
    ],
)
def test_what_a_freed_block_took_is_known_where_nothing_can_stay_unsplit(
    settings: dict[str, object], expandable: bool, expected: list[int]
) -> None:
    held = {**segment(block(7000, 600, size=1024)), "is_expandable": expandable}
    gone = ("alloc 1000 1024", "alloc 900000 1048577", "free_completed 1000 1024", "alloc 7000 600")
    written = snapshot([held], entries(*gone, "free_completed 900000 1048577"))
    trace = trace_from_snapshot({**written, "allocator_settings": settings}, "x")
    assert trace.allocations.rounded.tolist() == expected
    told = {"[512:8]"} if expected[0] < 0 and settings else {"off"} if settings else set()
    assert set(trace.properties.values()) == told


def test_no_size_is_derived_where_a_final_block_contradicts_the_rule() -> None:
    written = snapshot(
        [segment(block(7000, 600, size=4096), total=8192)], entries("free_completed 1000 1024")
    )
    written["allocator_settings"] = {"roundup_power2_divisions": {"1": 0}}
    assert sorted(trace_from_snapshot(written, "x").start.rounded.tolist()) == [-1, 4096]


def test_a_column_of_one_value_takes_no_memory_and_blocks_are_paired_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pairings: list[int] = []

    def counted(*columns: Any) -> Allocations:
        pairings.append(len(columns[0]))
        return pair(*columns)

    monkeypatch.setattr("tb_memplugin.trace.trace.pair", counted)
    history = entries("alloc 1000 100", "alloc 2000 50", "free_completed 1000 100")
    read = load(snapshot([segment(block(2000, 50))], history))
    assert read.live(0).tolist() == [0, 100, 150, 50]
    assert (read.events.context.strides, read.events.context.tolist()) == ((0,), [-1, -1, -1])
    assert (read.events.bytes.strides, read.events.bytes.tolist()) == ((8,), [100, 50, 100])
    assert pairings == [3]
