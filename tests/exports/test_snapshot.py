"""A snapshot written from a trace is read back to the same bytes, and PyTorch's own tools take it."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tb_memplugin import load
from tb_memplugin.exports import snapshot
from tb_memplugin.exports.snapshot import ACTIONS
from tb_memplugin.read.snapshot.trace import trace_from_snapshot
from tb_memplugin.trace import Kind
from tests.snapshots import block, entries, segment
from tests.snapshots import snapshot as made
from tests.traces import trace

DATA = Path(__file__).parents[3] / "shared" / "data"
REAL = sorted([*DATA.glob("snapshots/*.p*k*"), *DATA.glob("kineto/*.json*"), *DATA.glob("timeline/*.json*")])
real = pytest.mark.skipif(not REAL, reason=f"{DATA} holds strangers' recordings; it is absent")

RECORDED = made(
    [
        segment(block(1000, 400), block(1512, 90), block(2024, 0, "inactive", 1024)),
        segment(block(5000, 0, "inactive", 4096), total=4096),
    ],
    entries(
        "alloc 2024 70",
        "segment_alloc 5000 4096",
        "free_requested 2024 70",
        "free_completed 2024 70",
        "oom 12345 99999",
        "snapshot 0 0",
        "alloc 1512 90",
    ),
)
PROFILE = trace(
    "start 400 w category=parameter module=layer",
    "step 5",
    "alloc 100 a module=layer phase=forward",
    "alloc 60 b phase=backward",
    "free a",
    "alloc 7 c device=cuda:0 reserved=2048",
    "free c reserved=1024",
)


def again(written, path):
    notes = snapshot.write(written, path)
    return load(path), notes


def levels(written, device):
    """Live bytes of a device before its first event and after each of its own."""
    own = np.flatnonzero(written.events.device == device)
    return written.live(device)[np.concatenate(([0], own + 1))].tolist()


def reserved(written, device):
    return written.events.reserved[written.events.device == device].tolist()


def row_of(written, name):
    return [device.name for device in written.devices].index(name)


def test_a_recorded_snapshot_comes_back_to_the_byte(tmp_path):
    before = trace_from_snapshot(RECORDED, "here")
    after, notes = again(before, tmp_path / "out.pickle")
    assert notes == ()
    assert levels(after, 0) == levels(before, 0)
    assert reserved(after, 0) == reserved(before, 0)
    assert after.events.kind.tolist() == before.events.kind.tolist()
    assert after.events.time_ns.tolist() == before.events.time_ns.tolist()
    assert after.events.address.tolist() == before.events.address.tolist()
    assert [(oom.requested_bytes, oom.free_bytes) for oom in after.ooms] == [(99999, 12345)]


def test_it_is_a_pickle_of_the_protocol_that_viewers_read(tmp_path):
    snapshot.write(PROFILE, tmp_path / "out.pickle")
    assert (tmp_path / "out.pickle").read_bytes()[:2] == b"\x80\x04"


def test_a_profile_becomes_a_snapshot_and_it_is_said_what_is_made_up(tmp_path):
    after, notes = again(PROFILE, tmp_path / "out.pickle")
    cpu, cuda = row_of(after, "cuda:1"), row_of(after, "cuda:0")
    assert levels(after, cpu) == levels(PROFILE, 0) == [400, 500, 560, 460]
    assert "cpu is written as cuda:1." in notes
    assert any("made up" in note for note in notes)
    assert all(note in after.properties["tb_memplugin"] for note in notes)
    assert levels(PROFILE, 1) == [0, 7, 0]
    live_after_own = [
        int(after.live(cuda)[event + 1])
        for event in np.flatnonzero(after.events.device == cuda)
        if after.events.kind[event] in (Kind.ALLOC, Kind.FREE_COMPLETED)
    ]
    assert live_after_own == [7, 0]


def test_a_reserve_without_segment_events_is_kept(tmp_path):
    after, notes = again(PROFILE, tmp_path / "out.pickle")
    cuda = row_of(after, "cuda:0")
    rows = np.flatnonzero(
        (after.events.device == cuda) & np.isin(after.events.kind, (Kind.ALLOC, Kind.FREE_COMPLETED))
    )
    assert after.events.reserved[rows].tolist() == [2048, 1024]
    assert "cuda:0: changes of the reserved memory at made-up addresses: 1." in notes


def test_the_module_of_an_allocation_stands_in_its_metadata():
    content, _ = snapshot.snapshot_of(PROFILE)
    assert content["device_traces"][1][0]["user_metadata"] == "tb_memplugin.module=layer"
    assert content["device_traces"][1][1]["user_metadata"] == ""


def test_steps_and_phases_become_annotations():
    content, _ = snapshot.snapshot_of(PROFILE)
    names = {item["name"] for item in content["external_annotations"]}
    assert names == {"ProfilerStep#5", "forward", "backward"}
    times = [item["time_us"] for item in content["external_annotations"]]
    assert times == sorted(times)


def test_blocks_tile_their_segments():
    for written in (PROFILE, trace_from_snapshot(RECORDED, "here")):
        content, _ = snapshot.snapshot_of(written)
        for one in content["segments"]:
            at = one["address"]
            for piece in one["blocks"]:
                assert piece["address"] == at
                at += piece["size"]
            assert at == one["address"] + one["total_size"]


def test_addresses_are_made_up_anew_where_none_are_left_behind_the_known_ones(tmp_path):
    made_of = trace("start 400 w device=cuda:0", "alloc 100 a device=cuda:0")
    last = np.array([(1 << 64) - 512], np.uint64)
    made_of = replace(
        made_of,
        events=replace(made_of.events, address=last),
        start=replace(made_of.start, address=np.zeros(1, np.uint64)),
    )
    notes = snapshot.write(made_of, tmp_path / "a.pickle")
    assert "cuda:0: 2 blocks have made-up addresses." in notes
    assert load(tmp_path / "a.pickle").live(0).tolist() == [400, 500]


def test_a_device_that_only_reserves_is_kept(tmp_path):
    content = made([segment(block(1000, 5)), segment(block(9000, 0, "inactive", 2048), device=1)])
    snapshot.write(trace_from_snapshot(content, "x"), tmp_path / "a.pickle")
    again = load(tmp_path / "a.pickle")
    assert [device.reserved_at_start for device in again.devices] == [2048, 2048]


def test_the_same_stands_in_json(tmp_path):
    before = trace_from_snapshot(RECORDED, "here")
    snapshot.write_json(before, tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text())["segments"][0]["total_size"] == 2048
    assert levels(load(tmp_path / "out.json"), 0) == levels(before, 0)


def test_an_empty_trace_is_an_empty_snapshot(tmp_path):
    after, notes = again(trace(), tmp_path / "out.pickle")
    assert (len(after.events), len(after.allocations), notes) == (0, 0, ())


def test_an_event_that_tells_no_reserve_changes_none(tmp_path):
    before = trace(
        "alloc 600 a device=cuda:0 reserved=2097152", "alloc 600 b device=cuda:0", "free a reserved=2097152"
    )
    after, notes = again(before, tmp_path / "out.pickle")
    assert before.events.reserved.tolist() == [2 << 20, -1, 2 << 20]
    assert after.events.reserved.tolist() == [2 << 20] * 3
    assert not any("changes of the reserved memory" in note for note in notes)


def test_every_kind_of_event_has_an_action():
    assert set(ACTIONS) == set(Kind)


@real
@pytest.mark.parametrize("path", REAL, ids=lambda path: path.name[:12])
def test_real_recordings_come_back_to_the_byte(path, tmp_path):
    before = load(path)
    after, notes = again(before, tmp_path / "out.pickle")
    numbers = snapshot.device_numbers(before)
    for row, number in numbers.items():
        back = row_of(after, f"cuda:{number}")
        assert levels(after, back) == levels(before, row)
        if max(reserved(before, row), default=-1) >= 0:
            assert reserved(after, back) == reserved(before, row)
    if path.parent.name == "snapshots":
        assert notes == ()
        assert set(after.notes) <= set(before.notes)
        assert after.stacks == before.stacks
        for column in ("stack", "stream", "pool", "rounded", "label", "context"):
            assert table_of(after, column) == table_of(before, column), column


def table_of(written, column):
    """What a column says of each allocation, whatever the rows of its table are called."""
    tables = {
        "stack": "stacks",
        "stream": "streams",
        "pool": "pools",
        "label": "labels",
        "context": "contexts",
    }
    rows = getattr(written.allocations, column).tolist()
    if column not in tables:
        return rows
    names = getattr(written, tables[column])
    return [names[row] if row >= 0 else None for row in rows]


@real
@pytest.mark.parametrize("path", REAL, ids=lambda path: path.name[:12])
def test_pytorchs_own_tools_take_it(path, tmp_path):
    viz = pytest.importorskip("torch.cuda._memory_viz")
    snapshot.write(load(path), tmp_path / "out.pickle")
    content = pickle.loads((tmp_path / "out.pickle").read_bytes())
    for show in (viz.segsum, viz.trace, viz.trace_plot, viz.segment_plot):
        show(content)
    for show in (viz.memory, viz.segments):
        show(content, format_flamegraph=str)
