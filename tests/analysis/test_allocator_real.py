"""Segments, blocks, pools and levels of real snapshots, against the files' own final state."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from tb_memplugin.analysis.allocator import fragmentation, levels, pools, split_moments
from tb_memplugin.analysis.columns import time_cuts
from tb_memplugin.analysis.layout import Placement, layout
from tb_memplugin.analysis.leak_sites import leaks
from tb_memplugin.analysis.oom import oom_report
from tb_memplugin.analysis.pool_names import NOT_KNOWN, pool_key, stream_key
from tb_memplugin.analysis.segments import segments_at
from tb_memplugin.simulator import replay, simulated_trace
from tb_memplugin.trace import MemoryTrace
from tests.read.snapshot.test_real import FILES, path_of, real
from tests.snapshots import load_plain, load_snapshot

STATES = {"active_allocated": "allocated", "active_pending_free": "pending", "inactive": "free"}
SAMPLES = 25
Written = dict[str, Any]


@cache
def loaded(number: str) -> MemoryTrace:
    return load_snapshot(path_of(number))


@cache
def written(number: str) -> list[Written]:
    with path_of(number).open("rb") as stream:
        content: Any = load_plain(stream, number)
    segments = content if isinstance(content, list) else content["segments"]
    return sorted(segments, key=lambda segment: int(segment["address"]))


def of_device(number: str, name: str) -> list[Written]:
    return [segment for segment in written(number) if f"cuda:{segment['device']}" == name]


def blocks_of(segment: Written) -> list[tuple[str, int, int]]:
    """State, address and size of each block; files up to PyTorch 2.0 give no addresses."""
    at, found = segment["address"], []
    for block in segment["blocks"]:
        found.append((STATES[block["state"]], block.get("address", at), block["size"]))
        at += block["size"]
    return found


def sampled(trace: MemoryTrace) -> list[int]:
    return np.unique(np.linspace(-1, len(trace.events) - 1, SAMPLES).astype(int)).tolist()


@real
@pytest.mark.parametrize("number", FILES)
def test_the_last_moment_is_the_files_final_state_block_by_block(number: str) -> None:
    trace = loaded(number)
    for device, named in enumerate(trace.devices):
        found = segments_at(trace, device, len(trace.events) - 1)
        told = of_device(number, named.name)
        assert [(s.address, s.bytes, s.stream, s.expandable) for s in found] == [
            (s["address"], s["total_size"], stream_key(s["stream"]), s.get("is_expandable", False))
            for s in told
        ]
        assert [[(b.state, b.address, b.extent_bytes) for b in s.blocks] for s in found] == [
            blocks_of(s) for s in told
        ]
        assert all(block.rounded_bytes is not None for s in found for block in s.blocks)


@real
@pytest.mark.parametrize("number", FILES)
def test_pools_at_the_end_sum_to_what_the_segments_say(number: str) -> None:
    trace = loaded(number)
    for device, named in enumerate(trace.devices):
        told: dict[tuple[str, str], list[Written]] = defaultdict(list)
        for segment in of_device(number, named.name):
            pool = segment.get("segment_pool_id")  # not told up to PyTorch 2.0
            home = pool_key(pool) if pool else NOT_KNOWN
            told[home, stream_key(segment["stream"])].append(segment)
        found = {(pool.pool, pool.stream): pool for pool in pools(trace, device, len(trace.events) - 1)}
        assert found.keys() == told.keys()
        for key, pool in found.items():
            free = [b["size"] for s in told[key] for b in s["blocks"] if b["state"] == "inactive"]
            assert pool.reserved_bytes == sum(s["total_size"] for s in told[key])
            assert pool.rounded_bytes == sum(s["active_size"] for s in told[key])
            assert pool.active_bytes == sum(s["requested_size"] for s in told[key])
            assert (pool.free_bytes, pool.largest_free_bytes) == (sum(free), max(free, default=0))
            assert (pool.rounded_exact, pool.segments) == (True, len(told[key]))


@real
@pytest.mark.parametrize("number", FILES)
def test_at_every_moment_segments_sum_to_the_reserve_and_hold_every_block(number: str) -> None:
    trace = loaded(number)
    for device in range(len(trace.devices)):
        now = levels(trace, device)
        assert now.reserved is not None
        placement = Placement(trace, device)
        assert (placement.reserve.doubled, placement.reserve.strays) == (0, 0)
        for event in sampled(trace):
            found = placement.at(event)
            assert found.segments.bytes.sum() == now.reserved[event + 1]
            assert (len(found.misfits), found.overlaps) == (0, 0)
            assert found.extent.sum() + found.free_bytes.sum() == found.segments.bytes.sum()
            assert trace.allocations.bytes[found.rows].sum() == now.active[event + 1]
            # No block is smaller than what was asked for.
            assert np.all(found.extent >= trace.allocations.bytes[found.rows])


@real
@pytest.mark.parametrize("number", FILES)
def test_the_rule_of_rounding_alone_finds_every_size_that_the_file_tells(number: str) -> None:
    trace = loaded(number)
    untold = replace(
        trace,
        start=replace(trace.start, rounded=np.full(len(trace.start), -1)),
        events=replace(trace.events, rounded=np.full(len(trace.events), -1)),
    )
    for device in range(len(trace.devices)):
        told, ruled = (layout(each, device, len(trace.events) - 1) for each in (trace, untold))
        assert ruled.by_rule.all()
        assert not told.by_rule.any()
        assert ruled.extent.tolist() == told.extent.tolist()


@real
@pytest.mark.parametrize("number", FILES)
def test_levels_keep_their_order_and_end_as_the_file_does(number: str) -> None:
    trace = loaded(number)
    for device, named in enumerate(trace.devices):
        now = levels(trace, device)
        assert now.reserved is not None
        assert (now.pending >= 0).all()
        assert (now.allocated >= 0).all()
        assert (now.active <= now.reserved).all()
        told = of_device(number, named.name)
        waiting = [b for s in told for b in s["blocks"] if b["state"] == "active_pending_free"]
        assert now.pending[-1] == sum(block["requested_size"] for block in waiting)
        here = trace.events.device == device
        assert (now.reserved[1:][here] == trace.events.reserved[here]).all()


@real
@pytest.mark.parametrize("number", FILES)
def test_the_split_agrees_with_every_moment_at_which_it_is_drawn(number: str) -> None:
    trace = loaded(number)
    for device in range(len(trace.devices)):
        t0, t1 = trace.steps[0].start_ns, max(trace.steps[-1].end_ns, trace.steps[0].start_ns + 1)
        for event, split in split_moments(Placement(trace, device), time_cuts(trace, t0, t1, 10)):
            assert fragmentation(trace, device, event).split == split


@real
def test_the_gpu_that_ran_out_of_memory_is_reported_as_it_was_then() -> None:
    found = oom_report(loaded("01"))
    assert (found.device, found.cause) == ("cuda:1", "full")
    assert (found.requested_bytes, found.free_bytes) == (5308694528, 95682560)
    trace = loaded("01")
    assert found.active_bytes == trace.live(trace.device_row("cuda:1"))[found.event + 1]
    assert sum(part.bytes for part in found.stacks) == found.active_bytes
    assert found.reserve_free_bytes is not None
    assert found.reserved_bytes == found.reserve_free_bytes + sum(pool.rounded_bytes for pool in found.pools)


@real
@pytest.mark.parametrize("number", FILES)
def test_real_windows_of_less_than_three_steps_have_no_leaks(number: str) -> None:
    trace = loaded(number)
    assert [leaks(trace, device) for device in range(len(trace.devices))] == [()] * len(trace.devices)


@real
@pytest.mark.parametrize("number", ["01", "07", "20"])
def test_every_size_is_known_where_the_window_saw_all_large_blocks_born_or_kept(number: str) -> None:
    trace = loaded(number)
    for device in range(len(trace.devices)):
        assert not any(Placement(trace, device).at(event).by_rule.any() for event in sampled(trace))


@real
@pytest.mark.parametrize("number", ["01", "03", "07", "10", "12", "20"])
def test_what_blocks_take_is_what_the_simulated_allocator_set_aside_for_them(number: str) -> None:
    """The rule of rounding finds, from one moment alone, what following every split finds."""
    trace = loaded(number)
    devices = range(len(trace.devices))
    simulated = simulated_trace([replay(trace, device) for device in devices])
    for device in devices:
        ours, theirs = Placement(trace, device), Placement(simulated, device)
        for event in sampled(trace):
            found, true = ours.at(event), theirs.at(event)
            assert not true.by_rule.any()
            assert found.extent.tolist() == true.extent.tolist()
