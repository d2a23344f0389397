import pytest

from tests.commands.files import real, refused, run, step_snapshot, stranger, told, write


@pytest.fixture
def step(tmp_path):
    return write(tmp_path / "step.pickle", step_snapshot())


def test_the_bytes_around_an_alloc(step):
    assert told("usage", step, "--allocation", "0x1200") == {
        "device": "cuda:0",
        "event": 1,
        "bytes_before": 300,
        "bytes_after": 390,
        "allocation": {
            "key": "0x1200_0",
            "address": 0x1200,
            "version": 0,
            "bytes": 90,
            "tensor": None,
            "rounded_bytes": None,
            "alloc_event": 1,
            "alloc_time_ns": 10_000,
            "free_event": 3,
            "free_time_ns": 30_000,
            "why": "temporary: allocated outside forward, backward and optimizer, and freed before the next "
            "of them",
            "stack": ["step optim.py:3"],
        },
    }


@pytest.mark.parametrize("text", ["1200", "0x1200_0", "1200_0", "b1200_0"])
def test_the_bytes_around_a_free(step, text):
    found = told("usage", step, "--allocation", text, "--action", "free", "--device", "cuda:0")
    assert (found["event"], found["bytes_before"], found["bytes_after"]) == (3, 390, 300)


def test_events_count_over_all_devices(tmp_path):
    content = step_snapshot(device=1)
    content["device_traces"][0] = step_snapshot()["device_traces"][0]
    path = write(tmp_path / "two.pickle", content)
    assert (
        told("usage", path, "--allocation", "1200", "--device", "cuda:1")["event"] == 3
    )  # the second of its own


def test_people_see_before_and_after(step):
    shown = run("usage", step, "--allocation", "1200").stdout
    assert "alloc of 0x1200_0 (90 B) on cuda:0, event 1" in shown
    assert "+90" in shown
    assert "step optim.py:3" in shown


def test_an_address_that_begins_with_b_is_not_taken_for_memory_vizs_mark(step):
    assert "no allocation 0xb00_0" in refused("usage", step, "--allocation", "b00")
    assert "no allocation 0xb23456789abc_0" in refused("usage", step, "--allocation", "b23456789abc")


def test_what_is_not_there_is_refused_with_what_is(step):
    assert "0x1200 has versions 0 to 0" in refused("usage", step, "--allocation", "1200_1")
    assert "no allocation 0x9999_0" in refused("usage", step, "--allocation", "9999")
    assert "still alive" in refused("usage", step, "--allocation", "1000", "--action", "free")
    assert "is not an allocation" in refused("usage", step, "--allocation", "12 00")
    assert "Device 'cuda:7'" in refused("usage", step, "--allocation", "1200", "--device", "cuda:7")


@real
@pytest.mark.parametrize("text", ["7f217a800000_0", "b7f217a800000_0"])
def test_a_real_allocation_also_as_memory_viz_writes_it(text):
    found = told("usage", stranger("snapshots/20*"), "--allocation", text)
    assert (found["event"], found["bytes_after"] - found["bytes_before"]) == (2, 2097152)
