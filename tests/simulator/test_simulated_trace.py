"""Tests for the conversion of a replay into a trace that every view and export accepts."""

import random

import numpy as np
import pytest

from tb_memplugin.analysis.layout import faults
from tb_memplugin.analysis.oom import oom_report
from tb_memplugin.exports import snapshot
from tb_memplugin.read.snapshot.trace import trace_from_snapshot
from tb_memplugin.simulator import AllocatorSettings, replay, simulated_trace
from tb_memplugin.trace import Kind
from tests.analysis.histories import allocator_trace
from tests.simulator.devices import M, reserved_misses
from tests.simulator.test_replay import STEP

COLUMNS = ("kind", "address", "bytes", "stream", "pool", "reserved")


def told(trace):
    columns = (trace.events.kind, trace.events.address, trace.events.bytes)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [(Kind(kind).name.lower(), address // M, size // M) for kind, address, size in rows]


def sound(trace):
    """Assert that blocks never overlap or leave their segment, and that the trace can be written and read."""
    written, _ = snapshot.snapshot_of(trace)
    again = trace_from_snapshot(written, "written")
    rows = range(len(trace.devices))
    assert [faults(trace, row, event) for row in rows for event in range(-1, len(trace.events))] == [()] * (
        len(rows) * (len(trace.events) + 1)
    )
    assert [note for note in again.notes if "out of memory" not in note] == []
    for row in rows:
        assert again.live(row).tolist() == trace.live(row).tolist()
    assert again.events.address.tolist() == trace.events.address.tolist()
    assert again.events.reserved.tolist() == trace.events.reserved.tolist()
    return True


def test_an_exact_replay_gives_the_record_back():
    source = allocator_trace(
        "held 16M 20M",
        "live 16M 2M",
        "segment_alloc 64M 20M",
        "alloc 64M 19M",
        "free_completed 16M 2M",
        "segment_free 16M 20M",
    )
    made = simulated_trace([replay(source, 0)])
    for column in COLUMNS:
        assert getattr(made.events, column).tolist() == getattr(source.events, column).tolist()
    assert made.segments.address.tolist() == source.segments.address.tolist()
    assert made.devices == source.devices
    assert sound(made)


def test_what_blocks_take_is_known_for_each():
    made = simulated_trace(
        [
            replay(
                allocator_trace("held 16M 20M", "live 16M 2M", "alloc 18M 18350080"),
                0,
            )
        ]
    )
    assert made.start.rounded.tolist() == [2 * M]
    assert made.events.rounded.tolist() == [18 * M]  # with the rest of half a MiB


def test_other_settings_give_other_addresses_and_another_reserve():
    source = allocator_trace(
        "segment_alloc 100M 20M",
        "alloc 100M 14M",
        "segment_alloc 200M 20M",
        "alloc 200M 9M",
        "free_requested 100M 14M",
    )
    made = simulated_trace([replay(source, 0, AllocatorSettings(expandable_segments=True))])
    base = int(made.events.address[0])
    assert [(kind, at - base // M, size) for kind, at, size in told(made)] == [
        ("segment_map", 0, 20),
        ("alloc", 0, 14),
        ("segment_map", 20, 20),
        ("alloc", 14, 9),
        ("free_requested", 0, 14),
    ]
    assert made.events.reserved.tolist() == [20 * M, 20 * M, 40 * M, 40 * M, 40 * M]
    assert made.properties["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert made.source == "test, simulated allocator"
    assert sound(made)


def test_it_ends_with_the_request_that_failed():
    source = allocator_trace(*STEP, "segment_alloc 64M 30M", "alloc 64M 30M", "free_completed 64M 30M")
    made = simulated_trace([replay(source, 0, capacity=40 * M)])
    assert [kind for kind, *_ in told(made)][-2:] == ["alloc", "oom"]
    (oom,) = made.ooms
    assert (oom.event, oom.requested_bytes, oom.free_bytes) == (len(made.events) - 1, 30 * M, 20 * M)
    assert "30.0" in oom_report(made, 0).why or oom_report(made, 0).requested_bytes == 30 * M
    assert made.devices[0].capacity == 40 * M
    assert sound(made)


def test_a_failure_of_the_record_that_found_memory_is_left_out():
    source = allocator_trace("held 16M 20M", "live 16M 20M", "oom 100 30M", "free_completed 16M 20M")
    made = simulated_trace([replay(source, 0, capacity=60 * M)])
    assert "oom" not in [kind for kind, *_ in told(made)]
    assert made.ooms == ()
    assert any("found memory here" in note for note in made.notes)


def test_blocks_without_a_place_get_one_before_the_first_event():
    source = allocator_trace("live 16M 2M", "alloc 18M 3M")
    made = simulated_trace([replay(source, 0, AllocatorSettings())])
    assert made.segments.bytes.tolist() == [20 * M]
    assert (made.devices[0].reserved_at_start, made.events.reserved.tolist()) == (20 * M, [20 * M])
    assert made.events.address[0] - made.start.address[0] == 2 * M
    assert sound(made)


def test_a_block_that_did_not_wait_for_its_stream_is_freed_when_memory_ran_short():
    source = allocator_trace(
        "segment_alloc 16M 20M",
        "alloc 16M 20M",
        "free_requested 16M 20M",
        "segment_alloc 64M 20M",
        "alloc 64M 20M",
        "free_completed 16M 20M",
    )
    made = simulated_trace([replay(source, 0, capacity=30 * M)])
    assert [kind for kind, *_ in told(made)] == [
        "segment_alloc",
        "alloc",
        "free_requested",
        "free_completed",
        "segment_free",
        "segment_alloc",
        "alloc",
    ]
    assert sound(made)


def test_it_is_freed_early_also_where_the_record_ends_before():
    source = allocator_trace(
        "held 16M 20M", "live 16M 20M pending=1", "segment_alloc 64M 20M", "alloc 64M 20M"
    )
    made = simulated_trace([replay(source, 0, capacity=30 * M)])
    assert [kind for kind, *_ in told(made)] == ["free_completed", "segment_free", "segment_alloc", "alloc"]
    assert sound(made)


def test_other_devices_stay_as_they_were():
    source = allocator_trace(
        "segment_alloc 16M 20M", "alloc 16M 2M", "segment_alloc 64M 20M device=1", "alloc 64M 2M device=1"
    )
    made = simulated_trace([replay(source, 0, AllocatorSettings())])
    assert made.events.address[2:].tolist() == [64 * M, 64 * M]
    assert made.events.address[0] > 64 * M


@pytest.mark.parametrize(
    "conf", ["", "expandable_segments:True", "max_split_size_mb:20", "roundup_power2_divisions:2"]
)
@pytest.mark.parametrize("seed", range(6))
def test_random_histories_are_sound_and_reproduced(conf, seed):
    source = random_history(seed)
    settings = AllocatorSettings.from_conf(conf)
    for capacity in (None, 120 * M):
        made = simulated_trace([replay(source, 0, settings, capacity)])
        assert sound(made)
        again = replay(made, 0, recorded=True)
        assert again.exact_addresses == again.allocs == np.count_nonzero(made.events.kind == Kind.ALLOC)
        assert again.surprises == ()
        assert reserved_misses(again) == []


def random_history(seed, count=120):
    """Return random allocations and frees, some completed late; addresses only tell the blocks apart."""
    chance = random.Random(seed)
    lines: list[str] = []
    live: list[str] = []
    late: list[str] = []
    for number in range(1, count):
        if late and chance.random() < 0.3:
            lines.append(f"free_completed {late.pop(0)}")
        if live and chance.random() < 0.5:
            block = live.pop(chance.randrange(len(live)))
            lines.append(f"free_requested {block}")
            if chance.random() < 0.2:
                late.append(block)
            else:
                lines.append(f"free_completed {block}")
        else:
            block = f"{number * 64}M {chance.choice([300, 70_000, 3 * M, 9 * M, 11 * M, 25 * M])}"
            lines.append(f"alloc {block}")
            live.append(block)
    return allocator_trace(*lines)
