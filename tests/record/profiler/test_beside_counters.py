"""A device's allocator counts what happens on all threads: what it counted more is told as a number."""

from __future__ import annotations

import numpy as np

from tb_memplugin.record.profiler.memory_events import MemoryEvents, beside_counters


def events(device: str, *told: tuple[int, int]) -> MemoryEvents:
    """Events from (signed bytes, the allocator's total after it)."""
    size, total = np.array(told, np.int64).T
    rows = np.arange(len(size))
    none = np.full(len(size), -1, np.int64)
    address = rows.astype(np.uint64)
    row = np.zeros(len(size), np.uint8)
    return MemoryEvents(rows, address, size, total, total, row, none, none, none, rows, (device,))


def test_a_counter_that_moves_by_the_events_alone_says_nothing():
    assert beside_counters(events("cuda:0", (512, 1512), (1024, 2536), (-512, 2024))) == []


def test_what_another_thread_holds_for_a_while_is_the_difference():
    """It takes 2,048 bytes after the first event; and gives them and 1,000 older ones back later."""
    (note,) = beside_counters(events("cuda:0", (512, 1512), (512, 4072), (512, 1536)))
    assert "up to 2,048 bytes above this curve, and up to 1,000 below" in note


def test_the_cpus_counter_is_not_asked():
    assert beside_counters(events("cpu", (512, 512), (512, 99_999))) == []
