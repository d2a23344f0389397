"""Tests that replays of the recorded snapshots match every address and the reserved bytes exactly."""

from functools import cache

import pytest

from tb_memplugin import load
from tb_memplugin.analysis.layout import faults
from tb_memplugin.exports import snapshot
from tb_memplugin.simulator import AllocatorSettings, replay, simulated_trace
from tests.commands.files import real, stranger
from tests.simulator.devices import reserved_misses

COLUMNS = ("kind", "device", "address", "bytes", "reserved")
ALLOCATIONS = {
    "01": (2434, 199, 392),
    "03": (6624,),
    "07": (6769,),
    "10": (3058,),
    "12": (1935,),
    "20": (36,),
}
RESERVED = {
    "01": (8541700096, 84202749952, 21883781120),
    "03": (9265217536,),
    "07": (61111009280,),
    "10": (22519218176,),
    "12": (134217728,),
    "20": (3781165056,),
}

pytestmark = real


@cache
def recording(number):
    return load(stranger(f"snapshots/{number}_*"))


@pytest.mark.parametrize("number", ALLOCATIONS)
def test_every_address_and_the_reserve_are_exact(number):
    trace = recording(number)
    done = [replay(trace, device) for device in range(len(trace.devices))]
    assert tuple(one.exact_addresses for one in done) == ALLOCATIONS[number]
    assert tuple(one.allocs for one in done) == ALLOCATIONS[number]
    assert [one.surprises for one in done] == [()] * len(done)
    assert tuple(one.reserved_peak for one in done) == RESERVED[number]
    assert [reserved_misses(one) for one in done] == [[]] * len(done)


@pytest.mark.parametrize("number", ALLOCATIONS)
def test_every_event_of_the_reserve_comes_in_its_order(number):
    trace = recording(number)
    made = simulated_trace([replay(trace, device) for device in range(len(trace.devices))])
    for column in COLUMNS:
        assert getattr(made.events, column).tolist() == getattr(trace.events, column).tolist()
    assert made.ooms == trace.ooms


def test_the_failed_request_fails_on_a_device_of_that_size_too():
    # Without a limit the request would have been served.
    trace = recording("01")
    (oom,) = trace.ooms
    device = trace.device_row("cuda:1")
    assert replay(trace, device, capacity=84202749952 + 95682560).failure is None
    assert replay(trace, device, capacity=84202749952 + 95682560).rescued == ()
    assert replay(trace, device, recorded=False).rescued == (oom.event,)


@pytest.mark.parametrize("number", ["01", "07", "20"])
@pytest.mark.parametrize(
    "conf", ["expandable_segments:False", "expandable_segments:True", "max_split_size_mb:64"]
)
def test_what_if_on_a_real_recording_gives_a_sound_snapshot(number, conf, tmp_path):
    trace = recording(number)
    peak = max(RESERVED[number])
    settings = AllocatorSettings.from_conf(conf)
    for capacity in (None, peak, peak * 9 // 10):
        done = [replay(trace, device, settings, capacity) for device in range(len(trace.devices))]
        made = simulated_trace(done)
        snapshot.write(made, tmp_path / "made.pickle")
        again = load(tmp_path / "made.pickle")
        for device in range(len(trace.devices)):
            assert faults(again, device, len(again.events) - 1) == ()
            assert again.live(device)[-1] == trace.live(device)[min(one.end for one in done)]
            assert capacity is None or again.events.reserved.max(initial=0) <= max(
                capacity, done[0].reserved_at_start
            )


@pytest.mark.parametrize(
    ("number", "conf"),
    [
        ("01", "expandable_segments:False"),
        ("07", "expandable_segments:True"),
        ("10", "roundup_power2_divisions:2"),
    ],
)
def test_settings_that_were_not_the_recorded_ones_miss(number, conf):
    # This shows that the comparison can fail: wrong settings differ from the recording.
    done = replay(recording(number), 0, AllocatorSettings.from_conf(conf), recorded=True)
    assert done.first_miss is not None or done.surprises
    assert len(done.surprises) + done.allocs - done.exact_addresses > 10
