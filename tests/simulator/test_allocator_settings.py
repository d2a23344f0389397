import subprocess
import sys

import numpy as np
import pytest

from tb_memplugin import MemoryEstimator
from tb_memplugin.errors import MemPluginError
from tb_memplugin.simulator import AllocatorSettings, recorded_settings
from tb_memplugin.simulator.allocator_settings import not_followed
from tests.analysis.histories import allocator_trace
from tests.simulator.devices import K, M


def test_an_empty_text_gives_pytorchs_defaults():
    settings = AllocatorSettings.from_conf("")
    assert settings == AllocatorSettings()
    assert settings.conf == ""
    assert not settings.expandable_segments
    assert settings.large_segment_bytes == settings.max_rounding_bytes == 20 * M


def test_every_simulated_key():
    settings = AllocatorSettings.from_conf(
        "expandable_segments:True, max_split_size_mb:128,max_non_split_rounding_mb:50,"
        "large_segment_size_mb:40,"
        "garbage_collection_threshold:0.6,per_process_memory_fraction:0.5,roundup_power2_divisions:4,"
        "pinned_use_background_threads:True,backend:native"
    )
    assert settings == AllocatorSettings(
        expandable_segments=True,
        max_split_bytes=128 * M,
        max_rounding_bytes=50 * M,
        divisions=(4,) * 16,
        gc_threshold=0.6,
        memory_fraction=0.5,
        large_segment_bytes=40 * M,
    )
    assert AllocatorSettings.from_conf(settings.conf) == settings


def test_divisions_by_interval():
    # Sizes below 256 MiB are like those from 256 MiB; 512 MiB and 1 GiB have their own; `>` is from 2 GiB on.
    settings = AllocatorSettings.from_conf("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]")
    assert settings.divisions == (1,) * 9 + (2, 8) + (8,) * 5
    settings = AllocatorSettings.from_conf("roundup_power2_divisions:[64:8,128:2]")
    assert settings.divisions == (8,) * 7 + (2,) + (0,) * 8


@pytest.mark.parametrize(
    ("conf", "what"),
    [
        ("expandable_segments:true", "expandable_segments:true is not a valid setting"),
        ("expandable_segments", "expandable_segments: is not a valid setting"),
        ("max_split_size_mb:19", "max_split_size_mb:19 is not a valid setting"),
        ("max_split_size_mb:30,large_segment_size_mb:40", "max_split_size_mb:30 is not a valid setting"),
        (
            "max_non_split_rounding_mb:30,large_segment_size_mb:40",
            "max_non_split_rounding_mb:30 is not a valid setting",
        ),
        ("max_split_size_mb:lots", "max_split_size_mb:lots is not a valid setting"),
        ("large_segment_size_mb:10", "large_segment_size_mb:10 is not a valid setting"),
        ("garbage_collection_threshold:1.5", "garbage_collection_threshold:1.5 is not a valid setting"),
        ("roundup_power2_divisions:3", "roundup_power2_divisions:3 is not a valid setting"),
        ("roundup_power2_divisions:[3:2]", r"roundup_power2_divisions:\[3:2\] is not a valid setting"),
        ("roundup_power2_divisions:[64:2", "A bracket is not closed"),
        ("splits:3", "'splits' is not an allocator setting"),
        ("backend:cudaMallocAsync", "backend:cudaMallocAsync is a different allocator"),
        ("expandable_segments:True max_split_size_mb:40", "Truemax_split_size_mb:40 is not a valid setting"),
    ],
)
def test_a_text_that_pytorch_would_not_take(conf, what):
    with pytest.raises(MemPluginError, match=what) as refused:
        AllocatorSettings.from_conf(conf)
    assert "allocator settings" in str(refused.value)
    assert "fix:" in str(refused.value)


TEXTS = """
expandable_segments:True,max_split_size_mb:128
expandable_segments : False
expandable_segments:true
expandable_segments:1
expandable_segments:True max_split_size_mb:40
max_split_size_mb:19
max_split_size_mb:20
max_split_size_mb:20,
max_split_size_mb:30,large_segment_size_mb:40
max_non_split_rounding_mb:19
max_non_split_rounding_mb:20
large_segment_size_mb:40,max_non_split_rounding_mb:30
large_segment_size_mb:10
large_segment_size_mb:11
large_segment_size_mb:40
garbage_collection_threshold:0
garbage_collection_threshold:0.999
garbage_collection_threshold:1.0
roundup_power2_divisions:0
roundup_power2_divisions:1
roundup_power2_divisions:3
roundup_power2_divisions:[64:3]
roundup_power2_divisions:[64:0]
roundup_power2_divisions:[3:2]
roundup_power2_divisions:[>:8]
roundup_power2_divisions:[256:1,512:2,1024:4,>:8]
max_split_size_mb
""".strip().splitlines()

ASK_TORCH = """
import sys, torch
for text in sys.argv[1:]:
    torch._C._accelerator_setAllocatorSettings("large_segment_size_mb:20")  # it stays, else
    try:
        torch._C._accelerator_setAllocatorSettings(text)
        print(1)
    except Exception:
        print(0)
"""


def test_it_takes_the_texts_that_pytorch_takes():
    torch = pytest.importorskip("torch")
    if not hasattr(torch._C, "_accelerator_setAllocatorSettings"):
        pytest.skip("this torch cannot be asked without a GPU")
    # It runs in a process of its own, since torch's settings cannot be undone.
    asked = subprocess.run(
        [sys.executable, "-c", ASK_TORCH, *TEXTS], capture_output=True, text=True, check=True, timeout=120
    )
    by_torch = dict(zip(TEXTS, asked.stdout.split(), strict=True))
    assert {text: str(int(is_taken(text))) for text in TEXTS} == by_torch


def is_taken(text):
    try:
        AllocatorSettings.from_conf(text)
    except MemPluginError:
        return False
    return True


@pytest.mark.parametrize(
    ("requested", "rounded"), [(0, 512), (1, 512), (512, 512), (513, 1024), (M, M), (M + 1, M + 512)]
)
def test_requests_are_rounded_to_512_bytes(requested, rounded):
    assert AllocatorSettings().rounded(requested) == rounded


@pytest.mark.parametrize(
    ("requested", "rounded"),
    [
        (1200, 1536),  # not above 4 * 512: rounded to 512
        (2048, 2048),
        (2049, 2560),  # steps of 512 between 2048 and 4096
        (5 * K, 5 * K),
        (5 * K + 1, 6 * K),  # steps of 1 KiB between 4 and 8 KiB
        (8 * M, 8 * M),
        (9 * M, 10 * M),
    ],
)
def test_requests_are_rounded_to_a_quarter_between_powers_of_two(requested, rounded):
    settings = AllocatorSettings.from_conf("roundup_power2_divisions:4")
    assert settings.rounded(requested) == rounded


def test_divisions_hold_in_their_interval_only():
    settings = AllocatorSettings.from_conf("roundup_power2_divisions:[16:2,32:0]")
    assert settings.rounded(17 * M) == 24 * M
    assert settings.rounded(33 * M) == 33 * M
    assert settings.rounded(100 * K) == 128 * K  # sizes below the first interval are rounded as in it


def test_settings_that_are_known_and_not_followed_are_told():
    conf = "release_lock_on_cudamalloc:True, max_split_size_mb:64, pinned_use_background_threads:True"
    assert not_followed(conf) == (
        "release_lock_on_cudamalloc is not simulated; it is ignored.",
        "pinned_use_background_threads is a setting for host memory; it changes nothing here.",
    )
    collects = "garbage_collection_threshold:0.8"
    assert "has no effect" in not_followed(collects)[0]
    assert not_followed(f"{collects},per_process_memory_fraction:0.9") == ()
    with MemoryEstimator(conf=conf) as estimator:
        estimator.create_fake_tensor(2)
    assert not_followed(conf)[0] in estimator.estimate().notes


@pytest.mark.parametrize("conf", ["", "roundup_power2_divisions:8", "roundup_power2_divisions:[1:2,>:4]"])
def test_many_are_rounded_as_each_is(conf):
    settings = AllocatorSettings.from_conf(conf)
    sizes = np.array([0, 1, 511, 513, 4097, 5000, M + 1, 3 * M + 7, 70 * M + 1, 5000], np.int64)
    assert settings.rounded_all(sizes).tolist() == [settings.rounded(size) for size in sizes.tolist()]


@pytest.mark.parametrize(
    ("rounded", "segment"),
    [
        (512, 2 * M),
        (M, 2 * M),
        (M + 512, 20 * M),
        (10 * M - 512, 20 * M),
        (10 * M, 10 * M),
        (11 * M, 12 * M),
    ],
)
def test_the_size_of_a_new_segment(rounded, segment):
    assert AllocatorSettings().segment_size(rounded) == segment


def test_a_larger_segment_for_large_requests():
    settings = AllocatorSettings.from_conf("large_segment_size_mb:64")
    assert (settings.segment_size(3 * M), settings.segment_size(12 * M)) == (64 * M, 12 * M)


def test_settings_of_a_recording():
    recording = allocator_trace("held 16M 2M", properties={"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"})
    assert recorded_settings(recording).max_split_bytes == 64 * M


def test_settings_of_a_recording_that_tells_no_text():
    told = {
        "expandable_segments": "True",
        "max_split_size": "67108864",
        "garbage_collection_threshold": "0.5",
    }
    assert recorded_settings(allocator_trace("held 16M 2M", properties=told)) == AllocatorSettings(
        expandable_segments=True, max_split_bytes=64 * M, gc_threshold=0.5
    )
    told = {"max_split_size": "-1", "garbage_collection_threshold": "0.0"}
    assert recorded_settings(allocator_trace("held 16M 2M", properties=told)) == AllocatorSettings()


def test_mapped_segments_tell_that_they_expand():
    assert recorded_settings(allocator_trace("map 16M 20M", "alloc 16M 2M")).expandable_segments
    assert not recorded_settings(allocator_trace("segment_alloc 16M 20M", "alloc 16M 2M")).expandable_segments


def test_settings_of_a_recording_that_cannot_be_simulated():
    recording = allocator_trace(properties={"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"})
    with pytest.raises(MemPluginError, match="a different allocator"):
        recorded_settings(recording)
