"""What fills a GPU, by counters of an allocator, a driver and NVML that are not real."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tb_memplugin.record.whole_device import card
from tb_memplugin.record.whole_device.card import CardMemory, card_memory, cards_memory, with_private_pools

OWN = os.getpid()


def management(processes: dict[int, int | None]) -> SimpleNamespace:
    """NVML of a card of 1,000 bytes: 100 of the driver, 250 free, and the bytes of processes by number."""
    asked: list[str] = []

    def memory_of(handle, version):
        assert (handle, version) == ("handle", 2)
        return SimpleNamespace(total=1000, free=250, reserved=100, used=650)

    def handle_of(uuid):
        asked.append(uuid)
        return "handle"

    return SimpleNamespace(
        processes=processes,
        asked=asked,
        nvmlMemory_v2=2,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=handle_of,
        nvmlDeviceGetMemoryInfo=memory_of,
        nvmlDeviceGetComputeRunningProcesses=lambda _: [
            SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in processes.items()
        ],
    )


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    card._nvml.cache_clear()
    monkeypatch.setattr(card, "_first_outside", {})
    yield
    card._nvml.cache_clear()


@pytest.fixture
def nvml(monkeypatch) -> SimpleNamespace:
    module = management({OWN: 400, 5: 200})
    monkeypatch.setitem(sys.modules, "pynvml", module)
    return module


@pytest.fixture(autouse=True)
def counters(monkeypatch) -> dict[int, dict[str, int]]:
    """Two cards, of which this process uses the first: 180 requested, 200 allocated, 300 reserved."""
    by_card = {
        0: {"requested": 180, "allocated": 200, "reserved": 300},
        1: {"requested": 0, "allocated": 0, "reserved": 0},
    }

    def stats(index):
        return {
            f"{name}_bytes": {"all": {"current": size, "allocated": size}}
            for name, size in by_card[index].items()
        }

    def free(index):
        assert index == 0, "asking for the free bytes of a card creates a context on it"
        return 250, 900

    monkeypatch.setattr(torch._C, "_cuda_memoryStats", stats, raising=False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", free)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"u{index}"))
    return by_card


def read() -> CardMemory:
    memory = card_memory("cuda:0")
    assert memory is not None
    return memory


def known(memory) -> dict[str, int]:
    return {part.key: size for part, size in memory.parts.items()}


OF_PYTORCH = {"requested": 180, "rounding": 20, "cached": 100}


def test_without_nvml_only_what_is_free_is_known_beside_pytorch(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    (memory,) = cards_memory().values()
    assert (memory.total, known(memory)) == (900, {**OF_PYTORCH, "free": 250})


def test_nvml_tells_processes_apart_and_has_the_whole_of_nvidia_smi(nvml):
    memory = cards_memory()["cuda:0"]
    rest = {"free": 250, "driver": 100, "context": 100, "outside": 0, "other_processes": 200}
    assert (memory.total, known(memory)) == (1000, {**OF_PYTORCH, **rest})
    assert nvml.asked == ["GPU-u0"]
    assert "cuda:1" not in cards_memory()


def test_what_comes_after_the_first_reading_is_not_the_context(nvml):
    card_memory("cuda:0")
    nvml.processes[OWN] = 470  # a communicator of NCCL
    parts = known(read())
    assert (parts["context"], parts["outside"]) == (100, 70)
    nvml.processes[OWN] = 390
    parts = known(read())
    assert (parts["context"], parts["outside"]) == (90, 0)


@pytest.mark.parametrize(
    "processes",
    [
        pytest.param({11: 400, 5: 200}, id="numbers of the host, in a container"),
        pytest.param({OWN: None, 5: 200}, id="bytes that the driver does not tell"),
        pytest.param({}, id="no list"),
    ],
)
def test_an_unknown_share_of_this_process_is_not_guessed(nvml, processes):
    nvml.processes.clear()
    nvml.processes.update(processes)
    memory = read()
    assert (memory.total, known(memory)) == (1000, {**OF_PYTORCH, "free": 250, "driver": 100})


def test_a_process_that_stands_alone_in_the_list_is_this_one(nvml):
    nvml.processes.clear()
    nvml.processes[11] = 400
    parts = known(read())
    assert (parts["context"], parts["other_processes"]) == (100, 0)


def test_an_error_of_nvml_leaves_what_the_driver_tells(nvml, monkeypatch):
    def denied(*_, **__):
        raise RuntimeError("Insufficient Permissions")

    monkeypatch.setattr(nvml, "nvmlDeviceGetMemoryInfo", denied)
    assert read().total == 900


def test_an_allocator_without_requested_bytes_has_no_rounding(counters):
    del counters[0]["requested"]
    assert known(read()) == {"allocated": 200, "cached": 100, "free": 250}


def test_a_driver_that_tells_nothing_leaves_the_card_unknown(monkeypatch):
    def error(index):
        raise RuntimeError("not supported")

    monkeypatch.setattr(torch.cuda, "mem_get_info", error)
    assert card_memory("cuda:0") is None
    assert cards_memory() == {}


def test_what_is_unused_in_private_pools_is_a_part_of_its_own(nvml):
    """A graph has 60 bytes of a segment of 80; the pool of all others is no private one."""
    segments: list[dict[str, Any]] = [
        {"device": 0, "segment_pool_id": (0, 3), "total_size": 80, "allocated_size": 20},
        {"device": 0, "segment_pool_id": (0, 0), "total_size": 200, "allocated_size": 170},
        {"device": 0, "total_size": 20, "allocated_size": 10},  # as an older torch lists it
    ]
    memory = with_private_pools(cards_memory(), segments)["cuda:0"]
    parts = known(memory)
    assert (parts["cached"], parts["private_pools"], memory.total) == (40, 60, 1000)
