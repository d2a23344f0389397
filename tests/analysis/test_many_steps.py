"""What is asked of every step is asked once: a trace of many steps takes time by its events."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from tb_memplugin.analysis.peak import peak
from tb_memplugin.analysis.steps import step_stats
from tb_memplugin.trace import Device, Kind, MemoryTrace, Step, events, start_state

STEPS = 3000


def of_many_steps() -> MemoryTrace:
    """Step n allocates n bytes, reserves n more, and gives the bytes back."""
    size = np.repeat(np.arange(STEPS), 2)
    return MemoryTrace(
        source="test",
        events=events(
            10 * np.arange(2 * STEPS),
            kind=np.tile([Kind.ALLOC, Kind.FREE_COMPLETED], STEPS).astype(np.uint8),
            bytes=size,
            address=np.full(2 * STEPS, 512, np.uint64),
            reserved=size,
        ),
        start=start_state([]),
        devices=(Device("cuda:0", reserved_at_start=0),),
        steps=tuple(Step(number, 20 * number, 20 * number + 20) for number in range(STEPS)),
    )


def test_the_peak_of_thousands_of_steps_is_found_at_once():
    trace = of_many_steps()
    begin = time.process_time()
    top = peak(trace)
    assert (top.bytes, top.event) == (STEPS - 1, 2 * STEPS - 2)
    assert time.process_time() - begin < 5


def test_each_step_has_its_own_reserve_and_begins_with_that_of_the_step_before():
    trace = of_many_steps()
    assert [stats.peak_reserved_bytes for stats in step_stats(trace, 0)] == list(range(STEPS))
    falling = replace(trace, events=replace(trace.events, reserved=trace.events.reserved[::-1]))
    found = [stats.peak_reserved_bytes for stats in step_stats(falling, 0)]
    assert found[:3] == [STEPS - 1, STEPS - 1, STEPS - 2]
