"""The Allocator's routes: by hand on a snapshot of a few blocks, and on real ones."""

from __future__ import annotations

import gc
import pickle
import weakref
from dataclasses import replace

import pytest

import tb_memplugin
from tb_memplugin.server.routes.allocator import history_of
from tb_memplugin.server.session import Opened
from tb_memplugin.store.writer import RunWriter
from tests.read.snapshot.test_real import path_of, real
from tests.server.conftest import BIGGER
from tests.server.tab import Tab
from tests.snapshots import block, entries, segment, snapshot

M = 1 << 20
BASE = 16 * M
SECOND = 64 * M

FRAMES = [
    {"name": "at::empty", "filename": "??", "line": 0},
    {"name": "forward", "filename": "/home/me/model.py", "line": 12},
    {"name": "main", "filename": "/home/me/train.py", "line": 3},
]

# At the end: 600 bytes at the start of a 2 MiB segment, and a 20 MiB segment with 4 MiB in its middle.
SEGMENTS = [
    {
        **segment(block(BASE, 600, size=1024), block(BASE + 1024, 0, "inactive", 2 * M - 1024), total=2 * M),
        "segment_pool_id": (0, 0),
    },
    {
        **segment(
            block(SECOND, 0, "inactive", 8 * M),
            block(SECOND + 8 * M, 4 * M, size=4 * M),
            block(SECOND + 12 * M, 0, "inactive", 8 * M),
            total=20 * M,
        ),
        "stream": 0xABC,
        "segment_pool_id": (0, 1),
    },
]
TRACE = entries(
    f"segment_alloc {SECOND} {20 * M} 1000",
    f"alloc {SECOND} {8 * M} 2000",
    f"alloc {SECOND + 8 * M} {4 * M} 3000",
    f"free_requested {SECOND} {8 * M} 4000",
    f"oom {3 * M} {12 * M} 5000",
    f"free_completed {SECOND} {8 * M} 6000",
)
"""Before the first entry the 600 bytes are alive. The request of 12 MiB meets 3 MiB free on the device."""


def made():
    trace = [{**entry, "stream": 0xABC, "pool_id": (0, 1), "frames": FRAMES} for entry in TRACE]
    content = {**snapshot(SEGMENTS, trace), "allocator_settings": {"max_split_size": -1}}
    return {**content, "external_annotations": []}


@pytest.fixture
def logdir(tmp_path):
    path = tmp_path / "made.pickle"
    path.write_bytes(pickle.dumps(made()))
    RunWriter(str(tmp_path / "logs" / "made"), "rank0").write(tb_memplugin.load(path))
    return tmp_path / "logs"


@pytest.fixture
def tab(logdir):
    return Tab(logdir)


@pytest.fixture
def chosen(tab):
    (run,) = tab.get("runs")["runs"]
    step = run["workers"][0]["steps"]["step"][0]
    return {"run": "made", "worker": "rank0", "step": step, "device": "cuda:0"}


def test_the_state_before_the_first_event(tab, chosen):
    state = tab.get("allocator", **chosen, event=-1)
    assert (state["active_bytes"], state["reserved_bytes"]) == (600, 2 * M)
    assert (state["free_bytes"], state["largest_free_bytes"], state["split"]) == (
        2 * M - 1024,
        2 * M - 1024,
        0,
    )
    assert state["unused"] == (2 * M - 600) / (2 * M)
    assert (state["what"], state["previous_event"], state["next_event"]) == (None, None, 0)
    (pool,) = state["pools"]
    assert (pool["pool"], pool["stream"], pool["segments"]) == ("default", "default stream", 1)
    assert (pool["allocated_bytes"], pool["rounded_bytes"], pool["by_rule_bytes"]) == (600, 1024, 0)


def test_the_state_at_the_failed_request(tab, chosen):
    state = tab.get("allocator", **chosen, event=4)
    assert state["what"] == {
        "kind": "oom",
        "bytes": 12 * M,
        "address": "0x0",
        "line": "/home/me/model.py:12 (forward)",
    }
    assert (state["allocated_bytes"], state["pending_bytes"]) == (4 * M + 600, 8 * M)
    assert state["active_bytes"] == state["allocated_bytes"] + state["pending_bytes"]
    assert state["reserved_bytes"] == 22 * M
    assert state["free_bytes"] == 8 * M + 2 * M - 1024
    assert state["free"] == [
        {"from_bytes": M, "count": 1, "bytes": 2 * M - 1024},
        {"from_bytes": 8 * M, "count": 1, "bytes": 8 * M},
    ]
    private, default = state["pools"]
    assert (private["pool"], private["stream"]) == ("private (0, 1)", "stream 0xabc")
    assert (private["allocated_bytes"], private["pending_bytes"], private["free_bytes"]) == (
        4 * M,
        8 * M,
        8 * M,
    )
    assert default["allocated_bytes"] == 600
    assert state["outside"] == {"bytes": 0, "count": 0}
    assert state["settings"]["max_split_size"] == "-1"


def test_a_moment_may_be_given_as_a_time(tab, chosen):
    times = [tab.get("allocator", **chosen, event=event)["time_ns"] for event in range(6)]
    state = tab.get("allocator", **chosen, t=times[2] + 500)
    assert (state["event"], state["time_ns"]) == (2, times[2])
    assert times == sorted(times)


def test_pools_sum_to_the_device_at_every_moment(tab, chosen):
    for event in range(-1, 6):
        state = tab.get("allocator", **chosen, event=event)
        for column in ("allocated_bytes", "pending_bytes", "reserved_bytes", "free_bytes"):
            assert sum(pool[column] for pool in state["pools"]) == state[column], (event, column)
        rounded = sum(pool["rounded_bytes"] for pool in state["pools"])
        assert rounded + state["free_bytes"] == state["reserved_bytes"], event


def test_a_curve_over_events_has_a_state_for_each(tab, chosen):
    curve = tab.get("allocator_curve", **chosen, over="event", px=6)
    assert (curve["t0"], curve["t1"], curve["first_event"], curve["last_event"]) == (0, 6, 0, 5)
    active = [a + p for a, p in zip(curve["allocated"], curve["pending"], strict=True)]
    assert active == [600, 8 * M + 600, 12 * M + 600, 12 * M + 600, 12 * M + 600, 12 * M + 600]
    assert curve["low"] == [600, 600, 8 * M + 600, 12 * M + 600, 12 * M + 600, 4 * M + 600]
    assert curve["reserved"] == [22 * M] * 6
    assert (curve["peak"]["bytes"], curve["peak"]["event"]) == (12 * M + 600, 2)
    assert (curve["reserved_peak"]["bytes"], curve["reserved_peak"]["event"]) == (22 * M, 0)
    (failed,) = curve["ooms"]
    assert (failed["event"], failed["requested_bytes"], failed["step"]) == (4, 12 * M, chosen["step"])
    assert curve["knows_segments"] is True


@pytest.mark.parametrize("over", ["time", "event"])
@pytest.mark.parametrize("width", [1, 3, 7, 500])
def test_a_curve_keeps_what_is_highest_in_any_width(tab, chosen, over, width):
    curve = tab.get("allocator_curve", **chosen, over=over, px=width)
    assert len(curve["low"]) == len(curve["unused"]) == width
    assert max(a + p for a, p in zip(curve["allocated"], curve["pending"], strict=True)) == 12 * M + 600
    assert max(curve["reserved"]) == 22 * M
    assert max(curve["unused"]) == pytest.approx((22 * M - 600) / (22 * M))


def test_the_free_blocks_in_pieces_are_told_at_sampled_moments(tab, chosen):
    split = tab.get("allocator_curve", **chosen, over="event", px=6)["split"]
    assert [event for event, _, _ in split] == [0, 1, 2, 3, 4, 5]
    for event, time, ratio in split:
        state = tab.get("allocator", **chosen, event=event)
        assert (time, ratio) == (state["time_ns"], state["split"])


def test_segments_are_filled_by_their_pieces(tab, chosen):
    answer = tab.get("allocator_segments", **chosen, event=4)
    assert answer["segments"]["address"] == [hex(SECOND), hex(BASE)]
    assert answer["segments"]["bytes"] == [20 * M, 2 * M]
    assert answer["segments"]["free"] == [8 * M, 2 * M - 1024]
    assert [home["pool"] for home in answer["homes"]] == ["default", "private (0, 1)"]
    pieces = answer["pieces"]
    assert pieces["segment"] == [0, 0, 0, 1, 1]
    assert pieces["offset"] == [0, 8 * M, 12 * M, 0, 1024]
    assert pieces["bytes"] == [8 * M, 4 * M, 8 * M, 1024, 2 * M - 1024]
    assert pieces["requested"] == [8 * M, 4 * M, 0, 600, 0]
    assert pieces["state"] == [1, 0, 2, 0, 2]
    assert [row >= 0 for row in pieces["row"]] == [True, True, False, True, False]
    assert sum(key["bytes"] for key in answer["keys"]) == 12 * M + 600


@pytest.mark.parametrize(
    ("order", "first"), [("pool", SECOND), ("size", SECOND), ("free", SECOND), ("address", BASE)]
)
def test_segments_come_in_the_order_asked_for(tab, chosen, order, first):
    answer = tab.get("allocator_segments", **chosen, event=4, order=order)
    assert answer["segments"]["address"][0] == hex(first)


def test_pieces_narrower_than_a_pixel_are_merged_and_lose_no_byte(tab, chosen):
    pieces = tab.get("allocator_segments", **chosen, event=4, order="address", finest=16 * M)["pieces"]
    assert pieces["segment"] == [0, 1]
    assert pieces["bytes"] == [2 * M, 20 * M]
    assert pieces["count"] == [2, 3]
    assert pieces["row"] == [-1, -1]
    assert pieces["state"] == [
        2,
        1,
    ]  # of the largest: free; pending, the first of equals


def test_only_the_segments_asked_for_are_cut_into_pieces(tab, chosen):
    answer = tab.get("allocator_segments", **chosen, event=4, first=1, last=1)
    assert set(answer["pieces"]["segment"]) == {1}
    assert len(answer["segments"]["bytes"]) == 2


@pytest.mark.parametrize("by", ["category", "module", "line", "stack", "pool", "stream"])
def test_colours_divide_the_same_bytes(tab, chosen, by):
    answer = tab.get("allocator_segments", **chosen, event=4, by=by)
    assert sum(key["bytes"] for key in answer["keys"]) == 12 * M + 600
    for key, state in zip(answer["pieces"]["key"], answer["pieces"]["state"], strict=True):
        assert (key == -1) == (state == 2)
        assert key < len(answer["keys"])


def test_a_stack_goes_by_the_line_that_people_know(tab, chosen):
    keys = tab.get("allocator_segments", **chosen, event=4, by="stack")["keys"]
    assert {key["label"] for key in keys} == {"/home/me/model.py:12 (forward)", "(no stack)"}


def test_all_that_is_known_of_a_block(tab, chosen):
    pieces = tab.get("allocator_segments", **chosen, event=4)["pieces"]
    answer = tab.get("allocator_block", **chosen, event=4, row=pieces["row"][0])
    assert (answer["bytes"], answer["address"], answer["state"]) == (8 * M, hex(SECOND), "pending")
    assert (answer["born_event"], answer["pending_event"], answer["freed_event"]) == (1, 3, 5)
    assert (answer["rounded_bytes"], answer["by_rule"]) == (8 * M, True)
    assert answer["segment"] == {"address": hex(SECOND), "bytes": 20 * M, "offset": 0}
    assert (answer["pool"], answer["stream"]) == ("private (0, 1)", "stream 0xabc")
    frame = answer["stack"][1]
    assert frame["text"] == "forward /home/me/model.py:12"
    assert (frame["function"], frame["line"], frame["kind"]) == ("forward", 12, "user")
    gone = tab.get("allocator_block", **chosen, event=5, row=pieces["row"][0])
    assert (gone["state"], gone["segment"], gone["rounded_bytes"]) == ("gone", None, None)


def test_a_block_from_before_the_window(tab, chosen):
    pieces = tab.get("allocator_segments", **chosen, event=-1)["pieces"]
    answer = tab.get("allocator_block", **chosen, event=-1, row=pieces["row"][0])
    assert (answer["bytes"], answer["born_event"], answer["born_ns"]) == (600, None, None)
    assert (answer["rounded_bytes"], answer["by_rule"], answer["stack"]) == (1024, False, [])


def test_the_report_of_a_failed_request(tab, chosen):
    answer = tab.get("allocator_oom", **chosen)
    (report,) = answer["reports"]
    assert answer["ooms"] == tab.get("allocator_curve", **chosen)["ooms"]
    assert (report["requested_bytes"], report["free_bytes"], report["event"]) == (12 * M, 3 * M, 4)
    assert (report["reserved_bytes"], report["active_bytes"]) == (22 * M, 12 * M + 600)
    assert (report["largest_usable_bytes"], report["usable_free_bytes"]) == (8 * M, 8 * M)
    assert report["why"]
    assert sum(part["bytes"] for part in report["by_category"]) == report["active_bytes"]
    lines = report["lines"]
    assert (lines[0]["line"], lines[0]["bytes"]) == ("/home/me/model.py:12 (forward)", 12 * M)
    assert sum(line["bytes"] for line in lines) + report["other_lines"]["bytes"] == report["active_bytes"]


def test_of_many_failed_requests_the_first_of_the_step_and_the_last_20_are_reported(tmp_path):
    failed = [f"oom 0 {12 * M} {6000 + number}" for number in range(30)]
    steps = [(5000, "START", 0), (6009, "END", 0), (6010, "START", 1), (6029, "END", 1)]
    content = {
        **snapshot(SEGMENTS, entries(*failed)),
        "external_annotations": [
            {"name": f"ProfilerStep#{step}", "stage": stage, "device": 0, "time_us": time}
            for time, stage, step in steps
        ],
    }
    RunWriter(str(tmp_path / "run"), "rank0").write(tb_memplugin.load(content))
    tab = Tab(tmp_path)
    of_step_1 = {"run": "run", "worker": "rank0", "step": 1, "device": "cuda:0"}
    answer = tab.get("allocator_oom", **of_step_1)
    assert [one["number"] for one in answer["ooms"]] == list(range(30))
    assert [one["number"] for one in answer["reports"]] == list(range(10, 30))
    answer = tab.get("allocator_oom", **{**of_step_1, "step": 0})
    assert [one["number"] for one in answer["reports"]] == [0, *range(10, 30)]


@pytest.mark.parametrize(
    ("route", "wrong"),
    [
        ("allocator_curve", {"over": "moon"}),
        ("allocator_curve", {"px": 0}),
        ("allocator_curve", {"t0": 5, "t1": 5}),
        ("allocator", {}),
        ("allocator", {"event": 6}),
        ("allocator", {"event": "x"}),
        ("allocator_segments", {"event": 1, "by": "moon"}),
        ("allocator_segments", {"event": 1, "order": "moon"}),
        ("allocator_segments", {"event": 1, "finest": 0}),
        ("allocator_block", {"event": 1}),
        ("allocator_block", {"event": 1, "row": 99}),
    ],
)
def test_what_cannot_be_asked_for_is_refused(tab, chosen, route, wrong):
    status, error = tab.refused(route, **chosen, **wrong)
    assert status == 400
    assert error["fix"]


def test_without_its_side_file_the_absent_file_is_named(logdir, chosen):
    (logdir / "made/rank0/plugins/tb_memplugin/window-000000.mem").unlink()
    tab = Tab(logdir)
    for route in ("allocator_curve", "allocator", "allocator_segments", "allocator_oom"):
        status, error = tab.refused(route, **chosen, event=0)
        assert status == 404
        assert error["where"].endswith("window-000000.mem")


def test_a_recording_without_segments_says_so(tmp_path):
    RunWriter(str(tmp_path / "plain"), "rank0").write(BIGGER)
    tab = Tab(tmp_path)
    cpu = {"run": "plain", "worker": "rank0", "step": 5, "device": "cpu"}
    state = tab.get("allocator", **cpu, event=1)
    assert state["knows_segments"] is False
    assert (state["reserved_bytes"], state["free_bytes"], state["unused"], state["free"]) == (
        None,
        None,
        None,
        [],
    )
    curve = tab.get("allocator_curve", **cpu)
    assert (curve["reserved"], curve["unused"], curve["split"], curve["ooms"]) == (None, None, [], [])
    cuda = {**cpu, "device": "cuda:0"}
    assert tab.get("allocator", **cuda, event=2)["reserved_bytes"] == 2048
    assert max(tab.get("allocator_curve", **cuda)["reserved"]) == 2048
    assert tab.get("allocator_segments", **cuda, event=2)["pieces"]["row"] == []
    assert tab.get("allocator_oom", **cuda) == {"ooms": [], "reports": []}


@real
@pytest.mark.parametrize("number", ["01", "07", "10"])
def test_a_real_files_moments_sum_up(tmp_path, number):
    trace = tb_memplugin.load(path_of(number))
    RunWriter(str(tmp_path / "real"), "rank0").write(trace)
    tab = Tab(tmp_path)
    for device in trace.devices:
        one = {"run": "real", "worker": "rank0", "step": trace.steps[0].number, "device": device.name}
        curve = tab.get("allocator_curve", **one, px=300)
        for event in {-1, curve["peak"]["event"], curve["reserved_peak"]["event"], len(trace.events) - 1}:
            state = tab.get("allocator", **one, event=event)
            answer = tab.get("allocator_segments", **one, event=event, finest=M)
            assert sum(answer["segments"]["bytes"]) == state["reserved_bytes"]
            assert sum(answer["pieces"]["bytes"]) == state["reserved_bytes"]
            assert sum(answer["segments"]["free"]) == state["free_bytes"]
            assert sum(key["bytes"] for key in answer["keys"]) == state["active_bytes"]


def test_a_replay_is_made_once_and_goes_with_its_window():
    opened = Opened(BIGGER, 0, BIGGER.device_row("cuda:0"), 0)
    assert history_of(opened) is history_of(opened)
    copy = replace(BIGGER)
    other = history_of(Opened(copy, 0, opened.device, 0))
    assert other is not history_of(opened)
    gone = weakref.ref(other.placement)
    del copy, other
    gc.collect()
    assert gone() is None
