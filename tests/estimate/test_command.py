"""Tests for `tb-memplugin allocator` with a simulated allocator."""

import pytest

from tb_memplugin import load
from tb_memplugin.analysis.units import read_size
from tb_memplugin.errors import MemPluginError
from tb_memplugin.exports import snapshot
from tests.analysis.histories import allocator_trace
from tests.commands.files import real, refused, run, stranger, told
from tests.simulator.devices import M
from tests.simulator.test_replay import STEP


@pytest.fixture
def step(tmp_path):
    snapshot.write(allocator_trace(*STEP), tmp_path / "step.pickle")
    return tmp_path / "step.pickle"


def test_beside_the_record(step):
    assert told("allocator", step, "--replay") == {
        "devices": [
            {
                "device": "cuda:0",
                "allocs": 3,
                "exact_addresses": 3,
                "first_miss": None,
                "reserved_peak_recorded": 20 * M,
                "reserved_peak_simulated": 20 * M,
                "settings": "",
                "settings_recorded": False,
            }
        ]
    }
    assert "cuda:0" in run("allocator", step, "--replay").stdout


def test_the_first_miss(tmp_path):
    snapshot.write(allocator_trace(*STEP[:-1], "alloc 28M 2M"), tmp_path / "miss.pickle")
    (device,) = told("allocator", tmp_path / "miss.pickle", "--replay")["devices"]
    assert device["first_miss"] == {
        "event": 5,
        "bytes": 2 * M,
        "recorded_address": 28 * M,
        "simulated_address": 16 * M,
        "cause": "another free block fits best",
    }
    assert "first difference at event 5" in run("allocator", tmp_path / "miss.pickle", "--replay").stdout


def test_a_recording_without_its_settings_is_compared_with_those_that_are_given(tmp_path):
    # Under max_split_size_mb:20, the request of 4M may not use the free 24M.
    trace = allocator_trace("held 16M 24M", "segment_alloc 64M 20M", "alloc 64M 4M")
    saved = tmp_path / "old.pickle"
    snapshot.write(trace, saved)
    (device,) = told("allocator", saved, "--replay")["devices"]
    assert (device["exact_addresses"], device["settings_recorded"]) == (0, False)
    shown = run("allocator", saved, "--replay").stdout
    assert "does not contain the allocator's settings; this comparison is with the default settings" in shown
    (device,) = told("allocator", saved, "--replay", "--alloc-conf", "max_split_size_mb:20")["devices"]
    assert (device["exact_addresses"], device["settings"]) == (1, "max_split_size_mb:20")


def test_other_settings_and_another_device(step):
    (device,) = told("allocator", step, "--alloc-conf", "expandable_segments:True", "--capacity", "24MiB")[
        "devices"
    ]
    assert device == {
        "device": "cuda:0",
        "settings": "expandable_segments:True",
        "capacity_bytes": 24 * M,
        "fits": True,
        "failure": None,
        "recorded_failures_that_fit": [],
        "allocs": 3,
        "reserved_peak_recorded": 20 * M,
        "reserved_peak_simulated": 20 * M,
    }
    assert "fits" in run("allocator", step, "--capacity", "24MiB").stdout


def test_a_device_that_is_too_small(step):
    (device,) = told("allocator", step, "--capacity", str(10 * M))["devices"]
    assert not device["fits"]
    assert device["failure"] == {"event": 1, "requested_bytes": 4 * M, "reserved_bytes": 0, "live_bytes": 0}
    shown = run("allocator", step, "--capacity", "10MiB").stdout
    assert "out of memory at event 1: 4.00 MiB requested" in shown


def test_what_was_simulated_is_written_as_a_snapshot(step, tmp_path):
    told("allocator", step, "--alloc-conf", "expandable_segments:True", "-o", tmp_path / "made.pickle")
    made = load(tmp_path / "made.pickle")
    assert made.properties["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    (device,) = told("allocator", tmp_path / "made.pickle", "--replay")["devices"]
    assert (device["exact_addresses"], device["settings_recorded"]) == (3, True)


def test_a_recording_is_not_written_over(step):
    assert "error:" in refused("allocator", step, "--capacity", "24MiB", "-o", step)


def test_settings_and_sizes_that_are_none(step):
    assert "expandable_segments:yes is not a valid setting" in refused(
        "allocator", step, "--alloc-conf", "expandable_segments:yes"
    )
    assert "'much' is not a size" in refused("allocator", step, "--capacity", "much")


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GiB", 24 << 30), ("24 GB", 24 * 10**9), ("1.5GiB", 3 << 29), ("512", 512), ("80 GiB ", 80 << 30)],
)
def test_sizes(text, size):
    assert read_size(text, "--capacity") == size


@pytest.mark.parametrize("text", ["", "0", "-1GiB", "24gib", "GiB", "1e3", "9" * 30])
def test_no_sizes(text):
    with pytest.raises(MemPluginError, match="is not a size"):
        read_size(text, "--capacity")


@real
def test_a_kineto_trace_tells_no_segments():
    (device,) = told("allocator", stranger("kineto/k1*"), "--replay")["devices"]
    assert (device["device"], device["exact_addresses"], device["first_miss"]) == ("cuda:1", None, None)
    assert "contains no segments" in run("allocator", stranger("kineto/k1*"), "--replay").stdout


@real
def test_a_cpu_has_no_caching_allocator():
    assert told("allocator", stranger("kineto/k4*"), "--replay") == {"devices": []}
    assert "no device with a caching allocator" in run("allocator", stranger("kineto/k4*"), "--replay").stdout
