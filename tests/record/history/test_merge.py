"""A profile and the allocator's history of the same window become one trace that knows both."""

from __future__ import annotations

import gc
from dataclasses import replace

import numpy as np
import pytest

from tb_memplugin.read.snapshot.trace import trace_from_snapshot
from tb_memplugin.record.history.merge import HISTORY, merge_snapshot
from tb_memplugin.trace import (
    Annotations,
    Category,
    Device,
    Events,
    Kind,
    MemoryTrace,
    Phase,
)
from tb_memplugin.trace.tables import MODULE_MARK
from tests.read.snapshot.test_real import path_of, real
from tests.record.history.test_matching import as_profiled
from tests.snapshots import block, entries, load_snapshot, segment, snapshot
from tests.traces import EPOCH, trace
from tests.training import CNN, train

EPOCH_US = EPOCH // 1_000
WEIGHT, FIRST, SECOND = 0x1000, 0x2000, 0x3000
"""Addresses as `tests.traces` gives them out: 0x1000 apart, the start state first."""

PROFILE = (
    "start 512 weight device=cuda:0 category=parameter module=net.fc label=net.fc.weight",
    "alloc 512 x device=cuda:0 module=net.fc operator=aten::mm phase=forward category=activation",
    "alloc 1024 g device=cuda:0 module=net operator=aten::mm phase=backward category=gradient",
    "free x",
    "alloc 64 host device=cpu operator=aten::empty",
)
"""What the profiler sees: rounded block sizes, and a free when it is requested."""

STREAM = 0x77
FRAME = {"name": "forward", "filename": "net.py", "line": 7}


def history(*lines: str, segments=None, mark="") -> MemoryTrace:
    """The allocator's side, times in µs after the epoch; at its end the blocks of the story are live."""
    written = entries(*lines)
    for entry in written:
        entry["time_us"] += EPOCH_US
        entry["stream"] = STREAM
        if entry["action"] == "alloc":
            entry["frames"] = [FRAME]
            entry["user_metadata"] = MODULE_MARK + mark if mark else ""
    final = segments or [
        segment(block(WEIGHT, 400), total=0x2000),
        segment(block(SECOND, 900, size=1024), total=2048),
    ]
    return trace_from_snapshot(snapshot(final, written), "test")


STORY = (
    f"alloc {FIRST} 500 0",
    f"segment_alloc {SECOND} 2048 1",
    f"alloc {SECOND} 900 1",
    f"free_requested {FIRST} 500 2",
    f"free_completed {FIRST} 500 2",
)


@pytest.fixture
def merged() -> MemoryTrace:
    return merge_snapshot(trace(*PROFILE), history(*STORY))


def on(trace: MemoryTrace, name: str) -> np.ndarray:
    return np.flatnonzero(trace.events.device == trace.device_row(name))


def alloc_at(trace: MemoryTrace, address: int) -> int:
    return int(np.flatnonzero((trace.events.address == address) & (trace.events.kind == Kind.ALLOC))[0])


def test_the_device_has_the_allocators_events_and_the_others_are_as_they_were(merged):
    here = merged.events.kind[on(merged, "cuda:0")].tolist()
    assert here == [Kind.ALLOC, Kind.SEGMENT_ALLOC, Kind.ALLOC, Kind.FREE_REQUESTED, Kind.FREE_COMPLETED]
    assert merged.events.bytes[on(merged, "cpu")].tolist() == [64]


def test_an_alloc_has_both_sizes_its_stack_and_stream_and_what_the_profile_knows(merged):
    row = alloc_at(merged, FIRST)
    told = merged.events
    assert (told.bytes[row], told.rounded[row]) == (500, 512)
    assert merged.operators[told.operator[row]] == "aten::mm"
    assert merged.modules[told.module[row]].key == "net.fc"
    assert (told.phase[row], told.category[row]) == (Phase.FORWARD, Category.ACTIVATION)
    assert merged.stacks[told.stack[row]][0].startswith("forward net.py:7")


def test_what_was_alive_at_the_start_has_requested_bytes_and_its_owner(merged):
    (row,) = np.flatnonzero(merged.start.device == merged.device_row("cuda:0"))
    assert merged.start.bytes[row] == 400
    assert merged.labels[merged.start.label[row]] == "net.fc.weight"
    assert merged.start.category[row] == Category.PARAMETER


def test_live_bytes_are_the_allocators_requested_bytes_until_the_free_is_completed(merged):
    cuda = merged.device_row("cuda:0")
    assert merged.live(cuda)[-1] == 400 + 900
    assert merged.live(cuda).max() == 400 + 500 + 900


def test_steps_phases_and_calls_are_the_profiles(merged):
    profile = trace(*PROFILE)
    assert merged.steps == profile.steps
    assert np.array_equal(merged.phases.start_ns, profile.phases.start_ns)


def test_nothing_is_told_where_the_two_agree(merged):
    assert merged.notes == ()


def test_a_device_that_only_the_history_knows_is_added():
    quiet = trace("alloc 64 host device=cpu")
    merged = merge_snapshot(quiet, history(*STORY))
    assert [device.name for device in merged.devices] == ["cpu", "cuda:0"]
    assert merged.live(1)[-1] == 1300


def test_the_products_name_stays_with_the_device():
    profile = trace(*PROFILE)
    named = replace(profile, devices=(Device("cuda:0", 1 << 30, "a card"), profile.devices[1]))
    assert merge_snapshot(named, history(*STORY)).devices[0].product == "a card"


def test_stacks_are_the_histories_and_the_profiles_where_it_has_none():
    profile = trace(*PROFILE)
    first, second = alloc_at(profile, FIRST), alloc_at(profile, SECOND)
    stack, forward = np.full((2, len(profile.events)), -1, np.int32)
    stack[[first, second]], forward[second] = 0, 1
    profile = replace(
        profile,
        stacks=(("loss train.py:9",), ("forward net.py:3",)),
        events=replace(profile.events, stack=stack, forward=forward),
    )
    told = history(*STORY)
    bare = replace(told.events, stack=np.where(told.events.address == SECOND, -1, told.events.stack))
    merged = merge_snapshot(profile, replace(told, events=bare))
    events, stacks = merged.events, merged.stacks
    assert stacks[events.stack[alloc_at(merged, FIRST)]] == ("forward net.py:7",)
    assert stacks[events.stack[alloc_at(merged, SECOND)]] == ("loss train.py:9",)
    assert stacks[events.forward[alloc_at(merged, SECOND)]] == ("forward net.py:3",)


def test_an_empty_history_leaves_the_profile_and_says_nothing_of_a_device():
    profile = trace("alloc 64 host device=cpu")
    merged = merge_snapshot(profile, trace_from_snapshot({"segments": [], "device_traces": []}, "test"))
    assert np.array_equal(merged.events.bytes, profile.events.bytes)


class TestWhatContradictsIsCounted:
    def test_an_alloc_larger_than_its_block(self):
        grown = [line.replace("500", "700") for line in STORY]
        merged = merge_snapshot(trace(*PROFILE), history(*grown))
        told = "cuda:0: 1 allocs request more than the profiler counts for their block (700 bytes)."
        assert told in merged.notes

    def test_a_block_of_another_rounded_size(self):
        lines = [line.replace("alloc 1024 g", "alloc 2048 g") for line in PROFILE]
        merged = merge_snapshot(trace(*lines), history(*STORY))
        assert any("1 allocs have another rounded size" in note for note in merged.notes)
        assert merged.events.rounded[alloc_at(merged, SECOND)] == 1024

    def test_a_start_block_that_the_allocator_does_not_have(self):
        lines = ("start 512 ghost device=cuda:0", "alloc 512 x device=cuda:0", "free x")
        only_x = (f"alloc {FIRST} 500 0", f"free_requested {FIRST} 500 1", f"free_completed {FIRST} 500 1")
        merged = merge_snapshot(
            trace(*lines), history(*only_x, segments=[segment(block(SECOND, 0, "inactive"))])
        )
        told = "1 block (512 bytes) alive at the start of the profile"
        assert any(told in note for note in merged.notes)

    def test_a_mark_of_another_module(self):
        merged = merge_snapshot(trace(*PROFILE), history(*STORY, mark="other"))
        assert any("2 allocs have another module in the history" in note for note in merged.notes)
        assert merged.modules[merged.events.module[alloc_at(merged, FIRST)]].key == "net.fc"


def test_a_mark_names_the_owner_where_the_profile_has_none():
    lines = ("start 512 w device=cuda:0", "alloc 512 x device=cuda:0", "alloc 1024 y device=cuda:0", "free x")
    merged = merge_snapshot(trace(*lines), history(*STORY, mark="net.fc"))
    module = merged.modules[merged.events.module[alloc_at(merged, FIRST)]]
    assert (module.key, merged.modules[module.parent].key) == ("net.fc", "net")
    assert merged.labels == ()


def test_another_threads_allocs_are_in_the_trace_and_counted():
    more = (
        *STORY[:3],
        "alloc 36864 100 1",
        "free_requested 36864 100 2",
        "free_completed 36864 100 2",
        *STORY[3:],
    )
    merged = merge_snapshot(trace(*PROFILE), history(*more))
    assert merged.live(0).max() == 400 + 500 + 900 + 100
    assert any(
        note.startswith("cuda:0: 2 allocs and frees (200 bytes) are only in the allocator's history")
        for note in merged.notes
    )


@pytest.mark.parametrize(
    ("story", "reason"),
    [
        (STORY[3:], "2 of 3 profiled events are not in it"),
        ((), "3 of 3 profiled events are not in it"),
    ],
)
def test_where_they_cannot_be_joined_both_are_kept_and_the_trace_says_so(story, reason):
    profile = trace(*PROFILE)
    merged = merge_snapshot(profile, history(*story))
    assert [device.name for device in merged.devices] == ["cuda:0", "cpu", "cuda:0" + HISTORY]
    assert np.array_equal(merged.live(0)[np.r_[0, 1 + on(merged, "cuda:0")]], profile.live(0)[[0, 1, 2, 3]])
    assert any(reason in note and "Both are kept" in note for note in merged.notes)


def test_history_that_begins_too_late_is_not_joined_however_little_is_missing():
    lines = ["alloc 512 a device=cuda:0"]
    told = []
    for number in range(20):
        lines.append(f"alloc 512 b{number} device=cuda:0")
        told.append(f"alloc {0x2000 + 0x1000 * number} 500 {number + 1}")
    final = [segment(*(block(0x1000 * (n + 1), 500) for n in range(21)), total=1 << 20)]
    merged = merge_snapshot(trace(*lines), history(*told, segments=final))
    assert any("does not go back" in note for note in merged.notes)


def test_history_that_has_the_first_event_at_another_time_is_joined():
    lines = ["alloc 512 a device=cuda:0", *(f"alloc 512 b{number} device=cuda:0" for number in range(20))]
    told = ["alloc 4096 500 0", "free_requested 4096 500 0", "free_completed 4096 500 0"]  # by another thread
    told += [
        f"alloc {0x1000 * (number + 1)} 500 {number + 5_000 if number else 2_000}" for number in range(21)
    ]
    final = [segment(*(block(0x1000 * (n + 1), 500) for n in range(21)), total=1 << 20)]
    merged = merge_snapshot(trace(*lines), history(*told, segments=final))
    assert any("1 profiled events (512 bytes) are not in" in note for note in merged.notes)
    assert len(merged.devices) == 1


def test_a_frees_completion_on_the_histories_coarse_clock_does_not_move_the_profiles_times():
    profile = trace(
        "alloc 512 a device=cuda:0", "alloc 512 b device=cuda:0", "free a", "alloc 512 c device=cuda:0"
    )
    fine = EPOCH + np.array([900, 1_900, 2_100, 2_150])  # the clocks differ by 525 ns, the median says
    profile = replace(profile, events=replace(profile.events, time_ns=fine))
    told = (
        f"alloc {0x1000} 500 0",
        f"alloc {0x2000} 500 1",
        f"free_requested {0x1000} 500 2",
        f"free_completed {0x1000} 500 2",  # at 2,525 on the profile's clock, were nothing behind it
        f"alloc {0x4000} 500 2",
        f"alloc {0x9000} 500 3",
    )
    final = [segment(*(block(address, 500) for address in (0x2000, 0x4000, 0x9000)), total=0x9000)]
    merged = merge_snapshot(profile, history(*told, segments=final)).events
    assert (merged.time_ns - EPOCH).tolist() == [900, 1_900, 2_100, 2_150, 2_150, 3_525]
    assert merged.kind[3] == Kind.FREE_COMPLETED


def test_out_of_memory_points_at_the_same_event_as_before():
    told = history(*STORY[:3], "oom 50 9999 2", *STORY[3:])
    merged = merge_snapshot(trace(*PROFILE), told)
    (oom,) = merged.ooms
    assert merged.events.kind[oom.event] == Kind.OOM
    assert (oom.requested_bytes, oom.free_bytes) == (9999, 50)


def test_annotations_point_at_the_same_events_as_before():
    told = history(*STORY)
    noted = replace(
        told,
        annotation_names=("loss",),
        annotations=Annotations(
            time_ns=told.events.time_ns[[0, 3]],
            name=np.zeros(2, np.int32),
            ends=np.array([0, 1], np.uint8),
            device=np.zeros(2, np.uint8),
            event=np.array([-1, 3]),
        ),
    )
    found = merge_snapshot(trace(*PROFILE), noted).annotations
    assert found.event.tolist() == [-1, 3]
    assert found.ends.tolist() == [0, 1]


def test_a_block_of_the_start_that_is_freed_has_the_size_that_the_profiler_counts():
    final = [segment(block(WEIGHT, 400, "inactive"), total=0x1000)]
    told = history(f"free_requested {WEIGHT} 400 0", f"free_completed {WEIGHT} 400 0", segments=final)
    merged = merge_snapshot(trace("start 512 w device=cuda:0", "free w"), told)
    assert (merged.start.bytes.tolist(), merged.start.rounded.tolist()) == ([400], [512])


@real
@pytest.mark.parametrize("number", ["01", "03", "07", "12", "20"])
def test_a_merged_real_history_is_the_history_to_the_byte(number):
    told = load_snapshot(path_of(number))
    for device, known in enumerate(told.devices):
        profile, _ = as_profiled(told, device, lose=0.02, seed=11)
        merged = merge_snapshot(profile, told)
        row = merged.device_row(known.name)
        assert merged.live(row).max() == told.live(device).max()
        assert merged.live(row)[-1] == told.live(device)[-1]
        assert merged.start.bytes[merged.start.device == row].sum() == told.live(device)[0]
        assert len(merged.segments) == len(told.segments)


def as_allocator_tells(profile: MemoryTrace) -> MemoryTrace:
    """The history that a GPU's allocator would have written meanwhile: for three bytes less each time."""
    written = []
    for kind, address, size, time in zip(
        *(getattr(profile.events, name).tolist() for name in ("kind", "address", "bytes", "time_ns")),
        strict=True,
    ):
        actions = {Kind.ALLOC: ["alloc"], Kind.FREE_COMPLETED: ["free_requested", "free_completed"]}.get(
            kind, []
        )
        written += [f"{action} {address} {size - 3} {time // 1_000}" for action in actions]
    alive = profile.allocations.alive_at(len(profile.events), 0)
    blocks = [
        block(int(profile.allocations.address[row]), int(profile.allocations.bytes[row]) - 3)
        for row in alive
        if profile.allocations.address[row]
    ]
    total = 1 << 40
    return trace_from_snapshot(snapshot([segment(*blocks, total=total)], entries(*written)), "test")


def test_a_profile_of_ours_keeps_all_it_knows():
    gc.collect()  # what earlier tests left would be freed meanwhile
    (cycle,) = train(CNN())
    profile = replace(cycle.trace, devices=(Device("cuda:0"), *cycle.trace.devices[1:]))
    reported = profile.events.kind != Kind.STORAGE_FREE  # a CPU's alone
    profile = replace(
        profile,
        events=Events(**{name: getattr(profile.events, name)[reported] for name in Events.__slots__}),
    )
    merged = merge_snapshot(profile, as_allocator_tells(profile))
    allocs = merged.events.kind == Kind.ALLOC
    told = profile.events.kind == Kind.ALLOC
    for name in ("category", "module", "operator", "phase", "label", "time_ns", "address"):
        assert np.array_equal(getattr(merged.events, name)[allocs], getattr(profile.events, name)[told]), name
    assert np.array_equal(merged.events.rounded[allocs], profile.events.bytes[told])
    assert np.array_equal(merged.events.bytes[allocs], profile.events.bytes[told] - 3)
