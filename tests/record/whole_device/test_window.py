"""The whole devices of a window from readings at its start and end."""

from __future__ import annotations

from dataclasses import replace

from tb_memplugin.record.whole_device.card import CardMemory
from tb_memplugin.record.whole_device.host import HostMemory
from tb_memplugin.record.whole_device.window import WholeReading, whole_devices
from tb_memplugin.trace import Device, DevicePart, Moment
from tests.traces import trace


def card(total=1000, **known):
    parts = {DevicePart[name]: size for name, size in known.items()}
    return WholeReading({"cuda:0": CardMemory(total, parts)})


def host(highest, **known):
    memory = HostMemory(1000, is_limit=True, parts={DevicePart[name]: size for name, size in known.items()})
    return WholeReading({}, memory, highest)


def of_moments(wholes):
    return {whole.moment.key: {part.key: size for part, size in whole.parts} for whole in wholes}


def on_card(*lines):
    """A window on a card: 100 and 300 bytes, of 500 reserved ones."""
    return trace(
        "step 1",
        "alloc 100 a device=cuda:0 reserved=200",
        "alloc 300 b device=cuda:0 reserved=500",
        *lines,
    )


def peak_of(wholes):
    (peak,) = [whole for whole in wholes if whole.moment is Moment.PEAK]
    return peak


def test_parts_sum_to_the_whole_at_each_moment():
    start = card(ALLOCATED=0, CACHED=0, FREE=900, OTHER_PROCESSES=40)
    end = card(ALLOCATED=400, CACHED=100, FREE=420, OTHER_PROCESSES=50)
    wholes = whole_devices(start, end, on_card())
    assert {whole.total for whole in wholes} == {1000}
    assert of_moments(wholes) == {
        "start": {"other_processes": 40, "unknown": 60, "free": 900},
        "peak": {"allocated": 400, "cached": 100, "other_processes": 50, "unknown": 30, "free": 420},
        "end": {"allocated": 400, "cached": 100, "other_processes": 50, "unknown": 30, "free": 420},
    }


def test_the_peak_takes_what_others_have_from_the_nearest_reading():
    end = card(ALLOCATED=400, CACHED=100, FREE=420, OTHER_PROCESSES=50)
    start, quiet = card(FREE=1000), ["alloc 1 c device=cuda:0 reserved=500", "free c reserved=500"]
    late = peak_of(whole_devices(start, end, on_card()))
    assert late.read_at is Moment.END
    early = peak_of(whole_devices(start, end, on_card("free b reserved=500", *quiet * 5)))
    assert early.read_at is Moment.START
    assert dict(early.parts) == {DevicePart.ALLOCATED: 400, DevicePart.CACHED: 100, DevicePart.FREE: 500}


def test_a_reading_that_leaves_no_room_for_the_peak_is_of_another_time():
    """Another process had 700 bytes at the end; then the peak's 500 reserved ones would not have fitted."""
    end = card(ALLOCATED=0, CACHED=0, FREE=300, OTHER_PROCESSES=700)
    wholes = whole_devices(card(FREE=1000), end, on_card())
    assert {whole.moment: whole.read_at for whole in wholes}[Moment.PEAK] is Moment.START
    crowded = card(FREE=300, OTHER_PROCESSES=700)
    assert "peak" not in of_moments(whole_devices(crowded, end, on_card()))


def test_readings_that_count_twice_leave_less_than_nothing():
    wholes = whole_devices(card(FREE=900, OTHER_PROCESSES=120), None, on_card())
    assert of_moments(wholes) == {"start": {"other_processes": 120, "unknown": -20, "free": 900}}


def test_the_most_resident_is_of_this_window_only_if_it_rose():
    recorded = trace("step 1", "alloc 100 a")
    recorded = replace(recorded, devices=(Device("cpu"),))
    start, end = host(500, PROCESS=300, FREE=600), host(700, PROCESS=350, CHILDREN=50, FREE=500)
    wholes = whole_devices(start, end, recorded)
    assert of_moments(wholes) == {
        "start": {"process": 300, "unknown": 100, "free": 600},
        "peak": {"resident": 700, "unknown": 300},
        "end": {"process": 350, "children": 50, "unknown": 100, "free": 500},
    }
    assert all(whole.is_limit for whole in wholes)
    assert "peak" not in of_moments(whole_devices(start, host(500, PROCESS=350, FREE=500), recorded))


def test_a_device_that_was_not_read_has_nothing():
    assert whole_devices(card(), None, replace(on_card(), devices=(Device("cuda:1"),))) == ()
    assert whole_devices(None, None, on_card()) == ()
