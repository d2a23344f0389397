"""What a snapshot tells beside addresses and bytes: streams, pools, segments, annotations, failures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tb_memplugin.read.annotations import RENUMBERED
from tb_memplugin.read.snapshot.trace import trace_from_snapshot
from tb_memplugin.trace import MemoryTrace, OutOfMemory, Step
from tests.snapshots import block, entries, segment, snapshot


def read(content: dict[str, Any]) -> MemoryTrace:
    return trace_from_snapshot(content, "x")


def told(rows: list[dict[str, Any]], **fields: Any) -> list[dict[str, Any]]:
    return [{**row, **fields} for row in rows]


def test_streams_are_pointers_and_events_are_rows_of_them() -> None:
    first, second = told(entries("alloc 1000 100"), stream=0), told(entries("alloc 1512 100"), stream=-2)
    trace = read(snapshot([segment(block(1000, 100), block(1512, 100))], first + second))
    assert trace.streams == (0, 2**64 - 2)
    assert trace.events.stream.tolist() == [0, 1]


def test_a_block_alive_at_the_end_knows_what_was_set_aside_for_it() -> None:
    trace = read(
        snapshot(
            [segment(block(1000, 100), block(1512, 300))],
            entries("alloc 1000 100", "alloc 5000 200", "free_completed 5000 200"),
        )
    )
    assert trace.events.rounded.tolist() == [512, -1, -1]
    assert trace.start.bytes.tolist() == [300]
    assert trace.start.rounded.tolist() == [512]


def test_what_was_given_back_before_the_window_and_not_yet_free_is_pending() -> None:
    waiting = block(1000, 100, state="active_pending_free")
    rows = entries("free_completed 2000 50", "free_requested 3000 70", "free_completed 3000 70")
    trace = read(snapshot([segment(waiting, block(1512, 10))], rows))
    pending = dict(zip(trace.start.address.tolist(), trace.start.pending.tolist(), strict=True))
    assert pending == {1000: 1, 1512: 0, 2000: 1, 3000: 0}


def test_segments_go_back_to_what_was_reserved_before_the_first_entry() -> None:
    rows = entries(
        "segment_free 9000 50", "segment_map 1000 600", "segment_alloc 7000 200", "segment_unmap 2000 300"
    )
    final = [
        {**segment(total=1000), "is_expandable": True},
        {**segment(block(7000, 10), total=200), "address": 7000},
    ]
    trace = read(snapshot(final, rows))
    found = sorted(zip(trace.segments.address.tolist(), trace.segments.bytes.tolist(), strict=True))
    assert found == [(1600, 400), (2000, 300), (9000, 50)]
    assert trace.devices[0].reserved_at_start == 750
    assert trace.notes == ()


def test_segment_events_that_contradict_the_final_segments_are_counted_in_bytes() -> None:
    trace = read(snapshot([segment(total=100)], entries("segment_alloc 1000 300")))
    assert any("final segments differ by 200 bytes" in note for note in trace.notes)


def test_pools_are_told_by_the_entry_or_known_from_a_segment_that_stayed() -> None:
    graph = {**segment(block(1000, 100), total=512), "segment_pool_id": (7, 1)}
    rows = entries("alloc 1000 100", "segment_alloc 1000 512", "alloc 1000 100", "alloc 9000 1")
    rows += told(entries("free_completed 9000 1"), pool_id=(0, 0))
    trace = read(snapshot([graph], rows))
    assert [trace.pools[row] if row >= 0 else None for row in trace.events.pool] == [
        None,  # before the segment was there
        (7, 1),
        (7, 1),
        None,
        (0, 0),
    ]


def test_json_has_lists_for_pool_ids() -> None:
    trace = read(snapshot([segment()], told(entries("alloc 1 1", "free_completed 1 1"), pool_id=[0, 5])))
    assert trace.pools == ((0, 5),)


def test_annotations_stand_at_the_last_event_of_their_device() -> None:
    content = snapshot([segment(block(1000, 5))], entries("alloc 1000 5 20", "snapshot 0 0 40"))
    content["external_annotations"] = [
        {"name": "step", "stage": "END", "device": 0, "time_us": 39},
        {"name": "step", "stage": "START", "device": 0, "time_us": 10},
        {"name": "step", "stage": "START", "device": 5, "time_us": 10},
    ]
    trace = read(content)
    assert trace.annotation_names == ("step",)
    assert trace.annotations.ends.tolist() == [0, 1]
    assert trace.annotations.event.tolist() == [-1, 0]
    assert trace.notes == ("1 annotations have no known device, stage or time; left out.",)


def test_steps_are_the_profilers_where_it_was_on() -> None:
    content = snapshot(
        [segment(block(1000, 5), block(1512, 7))], entries("alloc 1000 5 20", "alloc 1512 7 40")
    )
    content["external_annotations"] = [
        {"name": f"ProfilerStep#{number}", "stage": stage, "device": 0, "time_us": time}
        for number, stage, time in [(3, "START", 10), (3, "END", 30), (4, "START", 30)]
    ]
    trace = read(content)
    assert trace.steps == (Step(3, 10_000, 30_000), Step(4, 30_000, 40_001))
    assert [trace.step_events(row) for row in range(2)] == [(0, 1), (1, 2)]


@pytest.mark.parametrize(("failed_at", "steps"), [(28, (3,)), (60, (0,))])
def test_a_request_that_fails_after_the_profiled_steps_is_in_none_of_them(
    failed_at: int, steps: tuple[int, ...]
) -> None:
    content = snapshot([segment(block(1000, 5))], entries("alloc 1000 5 20", f"oom 512 7 {failed_at}"))
    content["external_annotations"] = [
        {"name": "ProfilerStep#3", "stage": stage, "device": 0, "time_us": time}
        for stage, time in [("START", 10), ("END", 30)]
    ]
    trace = read(content)
    assert tuple(step.number for step in trace.steps) == steps
    assert trace.step_at(trace.ooms[0].event).number == steps[0]


def test_steps_of_a_second_profile_are_no_part_of_the_first_ones() -> None:
    content = snapshot(
        [segment(block(1000, 5), block(1512, 7))], entries("alloc 1000 5 20", "alloc 1512 7 60")
    )
    content["external_annotations"] = [
        {"name": f"ProfilerStep#{number}", "stage": stage, "device": device, "time_us": time}
        for number, stage, device, time in [
            (9, "END", 0, 5),  # its start is older than the snapshot
            (0, "START", 0, 10),
            (0, "START", 1, 11),  # the same step, seen from another device
            (0, "END", 0, 30),
            (1, "START", 0, 30),
            (1, "END", 0, 40),
            (0, "START", 0, 50),
            (0, "END", 0, 55),
        ]
    ]
    content["device_traces"].append(entries("snapshot 0 0 10"))
    trace = read(content)
    assert trace.steps == (Step(0, 10_000, 30_000), Step(1, 30_000, 40_000), Step(2, 50_000, 55_000))
    assert [trace.step_events(row) for row in range(3)] == [(0, 2), (2, 2), (2, 3)]
    assert trace.notes == (RENUMBERED,)


def test_a_failed_request_stands_at_its_place_among_all_devices_events() -> None:
    first = entries("alloc 1000 5 10", "alloc 2000 5 30")
    second = entries("oom 77 900 20")
    trace = read(snapshot([segment(block(1000, 5), block(2000, 5))], first, second))
    assert trace.ooms == (OutOfMemory(event=1, requested_bytes=900, free_bytes=77),)


def test_our_own_marks_name_the_module_and_those_around_it() -> None:
    rows = told(entries("alloc 1000 5"), user_metadata="tb_memplugin.module=layers.0")
    rows += told(entries("alloc 1512 5"), user_metadata="someone else's")
    trace = read(snapshot([segment(block(1000, 5), block(1512, 5))], rows))
    keys = [module.key for module in trace.modules]
    assert keys == ["(not named)", "", "layers", "layers.0"]
    assert [trace.modules[row].parent for row in range(4)] == [-1, -1, 1, 2]
    assert [keys[row] for row in trace.events.module] == ["layers.0", "(not named)"]


def test_a_mark_of_dots_alone_is_no_tree() -> None:
    rows = told(entries("alloc 1000 5"), user_metadata="tb_memplugin.module=" + "." * 100_000)
    assert len(read(snapshot([segment(block(1000, 5))], rows)).modules) == 2


def test_compile_contexts_forward_frames_and_fx_nodes_are_kept() -> None:
    frame = {"name": "run", "filename": "m.py", "line": 3, "fx_node_name": "add_1", "fx_node_op": "call"}
    rows = told(entries("alloc 1000 5"), compile_context="0/1", forward_frames=["f a.py:1"], frames=[frame])
    trace = read(snapshot([segment(block(1000, 5))], rows + told(rows[:0], compile_context="N/A")))
    assert trace.contexts == ("0/1",)
    assert trace.stacks[trace.events.stack[0]] == ("run m.py:3 [fx add_1 call]",)
    assert trace.stacks[trace.events.forward[0]] == ("f a.py:1",)


def test_pinned_host_memory_is_a_device_of_its_own() -> None:
    content = snapshot([segment(block(1000, 5))], entries("alloc 1000 5"))
    content["host_segments"] = [segment(block(4096, 40), total=4096)]
    content["host_traces"] = [entries("alloc 4096 40")]
    trace = read(content)
    assert [device.name for device in trace.devices] == ["cuda:0", "pinned"]
    assert trace.live(1).max() == 40


def test_no_pinned_host_memory_is_no_device() -> None:
    content = snapshot([segment(block(1000, 5))], entries("alloc 1000 5"))
    trace = read({**content, "host_segments": [], "host_traces": [[]]})
    assert [device.name for device in trace.devices] == ["cuda:0"]


def test_pinned_host_memory_in_an_unknown_form_is_said_and_the_rest_is_read() -> None:
    content = snapshot([segment(block(1000, 5))], entries("alloc 1000 5"))
    content["host_segments"] = [{"what": "is this"}, {"total_size": 4096}]
    trace = read(content)
    assert np.array_equal(trace.live(0), [0, 5])
    assert any("pinned host memory, of which 4,096 bytes can be read" in note for note in trace.notes)
