"""What fills a whole device, in words, and of steps that a monitor watched."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tb_memplugin.analysis.whole_device import whole_line, whole_name, whole_of, whole_of_step
from tb_memplugin.trace import DevicePart, Moment, WholeDevice
from tb_memplugin.trace.counters import parts_of
from tests.step_figures import figures
from tests.traces import trace

GIB = 1 << 30
PYTORCH = {DevicePart.REQUESTED: 30 * GIB, DevicePart.ROUNDING: 1, DevicePart.CACHED: 10 * GIB - 1}


def whole(moment=Moment.END, read_at=None, total=80 * GIB, **known):
    parts = {DevicePart[name]: size for name, size in known.items()}
    return WholeDevice(0, moment, moment if read_at is None else read_at, parts_of(total, parts))


def test_parts_sum_to_the_whole_whatever_is_known():
    free = {DevicePart.FREE: 0}
    for known in ({}, PYTORCH, {**PYTORCH, **free}, {DevicePart.DRIVER: 90 * GIB, **free}):
        parts = parts_of(80 * GIB, known)
        assert sum(size for _, size in parts) == 80 * GIB
    assert parts_of(7, {**free, DevicePart.CACHED: 0, DevicePart.ALLOCATED: 7}) == (
        (DevicePart.ALLOCATED, 7),
        (DevicePart.FREE, 0),
    )


def test_a_trace_has_the_moments_of_each_device():
    first, second = whole(ALLOCATED=1), replace(whole(ALLOCATED=2), device=1)
    recorded = trace("step 1", "alloc 1 a", whole_devices=(first, second))
    assert (whole_of(recorded, 0), whole_of(recorded, 1)) == ((first,), (second,))


def test_without_nvml_what_is_not_known_is_a_number_with_what_it_may_be():
    line = whole_line([whole(ALLOCATED=30 * GIB, CACHED=10 * GIB, FREE=35 * GIB)], "cuda:0")
    assert line == (
        "the whole device at the window's end, 80.00 GiB: 30.00 GiB allocated by PyTorch, with rounding, "
        "10.00 GiB reserved by PyTorch, not allocated, "
        "5.00 GiB not known: CUDA context, NCCL, CUDA graphs, other processes, 35.00 GiB free"
    )


def test_the_peak_is_preferred_and_says_when_others_were_read():
    peak = whole(Moment.PEAK, Moment.START, ALLOCATED=40 * GIB, CONTEXT=GIB, FREE=39 * GIB)
    line = whole_line([whole(Moment.START, FREE=GIB), peak, whole(FREE=GIB)], "cuda:0")
    assert line == (
        "the whole device at the peak (what is not PyTorch's: at the window's start), 80.00 GiB: "
        "40.00 GiB allocated by PyTorch, with rounding, 1.00 GiB CUDA context and libraries, 39.00 GiB free"
    )


def test_of_the_host_the_end_tells_more_than_the_peak():
    end = whole(PROCESS=5 * GIB, CHILDREN=2 * GIB, FREE=70 * GIB)
    line = whole_line([whole(Moment.PEAK, RESIDENT=9 * GIB), end], "cpu")
    assert line == (
        "the machine's memory at the window's end, 80.00 GiB: 5.00 GiB this process, 2.00 GiB its children, "
        "3.00 GiB not known: other processes and the system, 70.00 GiB free; "
        "the most resident in this process was 9.00 GiB"
    )


@pytest.mark.parametrize(
    ("device", "is_limit", "name"),
    [
        ("cpu", False, "the machine's memory"),
        ("cpu", True, "the cgroup's limit"),
        ("cuda:1", False, "the whole device"),
        ("process", False, "the machine's memory or its cgroup's limit"),
    ],
)
def test_what_the_whole_is(device, is_limit, name):
    assert whole_name(replace(whole(FREE=1), is_limit=is_limit), device) == name


def test_what_was_counted_twice_is_said_so():
    line = whole_line([whole(total=100, ALLOCATED=60, FREE=50)], "cuda:0")
    assert line is not None
    assert "-10 B counted twice, because not all was read at one instant, 50 B free" in line


def test_nothing_read_is_no_line():
    assert whole_line([], "cpu") is None


def test_a_step_that_a_monitor_watched_sums_to_the_whole_device():
    """400 bytes were the peak: 200 allocated at the end, 800 reserved."""
    (device,) = figures([400, 400]).devices
    assert whole_of_step(device, 0) is None  # as from older versions
    watched = replace(
        device,
        end_requested=np.array([150, -1]),
        whole_free=np.array([1000, -1]),
        whole_total=np.array([3000, -1]),
    )
    step = whole_of_step(watched, 0)
    assert step is not None
    assert {part.key: size for part, size in step.parts} == {
        "requested": 150,
        "rounding": 50,
        "cached": 600,
        "unknown": 1200,
        "free": 1000,
    }
    assert whole_of_step(watched, 1) is None


def test_a_step_of_the_process_has_its_resident_memory():
    (device,) = figures([400], device="process").devices
    watched = replace(device, whole_free=np.array([500]), whole_total=np.array([1000]))
    step = whole_of_step(watched, 0)
    assert step is not None
    assert {part.key: size for part, size in step.parts} == {"resident": 200, "unknown": 300, "free": 500}
