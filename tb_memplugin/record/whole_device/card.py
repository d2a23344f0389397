"""Read what fills a GPU: PyTorch's allocator from its counters, the rest from the driver and from NVML.

`mem_get_info` has the device's total and free bytes. NVML (the package nvidia-ml-py, which is not required)
also has the bytes of each process; with it, total and free are those of nvidia-smi.
"""

from __future__ import annotations

import collections
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from tb_memplugin.record.torch_private.allocators import BINDINGS, MEMORY_STATS
from tb_memplugin.trace import Counter
from tb_memplugin.trace.counters import DevicePart

logger = logging.getLogger("tb_memplugin")

DEFAULT_POOL = (0, 0)


@dataclass(frozen=True, slots=True)
class CardMemory:
    """A whole GPU: its bytes, and those of the parts that are known."""

    total: int
    parts: dict[DevicePart, int]


def cards_memory() -> dict[str, CardMemory]:
    """Return what fills each CUDA and XPU device on which this process has allocated, by its name.

    Other devices are left alone: to ask for their free bytes would create a context on them.
    """
    used = (name for name, stats in counters_in_use() if stats["reserved_bytes"]["all"]["allocated"])
    return {name: memory for name in used if (memory := card_memory(name)) is not None}


def card_memory(name: str) -> CardMemory | None:
    """Return what fills a device in use; None where its driver does not know.

    Args:
        name: such as `cuda:0`.
    """
    kind, index = name.split(":")
    stats = _counters(kind, int(index))
    free_and_total = free_of(kind, int(index)) if stats is not None else None
    if stats is None or free_and_total is None:
        return None
    parts = _of_allocator(stats)
    driver = driver_memory(int(index)) if kind == "cuda" else None
    if driver is None:
        free, total = free_and_total
        return CardMemory(total, {**parts, DevicePart.FREE: free})
    parts |= {DevicePart.FREE: driver.free, DevicePart.DRIVER: driver.reserved}
    if driver.own is not None:
        outside = driver.own - stats["reserved_bytes"]["all"]["current"]
        first = _first_outside.setdefault((os.getpid(), name), outside)
        parts |= {DevicePart.CONTEXT: min(first, outside), DevicePart.OUTSIDE: max(outside - first, 0)}
        parts[DevicePart.OTHER_PROCESSES] = driver.other_processes
    return CardMemory(driver.total, parts)


def with_private_pools(
    cards: Mapping[str, CardMemory], segments: Iterable[Mapping[str, Any]]
) -> dict[str, CardMemory]:
    """Return cards on which what is reserved in private pools, but not allocated, is a part of its own.

    Args:
        cards: by device name.
        segments: of CUDA's allocator, as `torch.cuda.memory_snapshot()` lists them.
    """
    unused: collections.Counter[str] = collections.Counter()
    for segment in segments:
        if pool_of(segment) != DEFAULT_POOL:
            unused[f"cuda:{segment['device']}"] += segment["total_size"] - segment["allocated_size"]
    return {
        name: replace(
            card,
            parts={
                **card.parts,
                DevicePart.CACHED: card.parts[DevicePart.CACHED] - unused[name],
                DevicePart.PRIVATE_POOLS: unused[name],
            },
        )
        for name, card in cards.items()
    }


def pool_of(segment: Mapping[str, Any]) -> tuple[int, int]:
    """Return the pool of a segment; `DEFAULT_POOL` if it is in no private one."""
    first, second = segment.get("segment_pool_id", DEFAULT_POOL)
    return first, second


def free_of(kind: str, index: int) -> tuple[int, int] | None:
    """Return the free and all bytes of a device in use, None where they are not known."""
    try:
        free, total = getattr(torch, kind).mem_get_info(index)
    except (AttributeError, RuntimeError):  # an older torch, or a driver that does not tell
        return None
    return int(free), int(total)


@dataclass(frozen=True, slots=True)
class DriverMemory:
    """What NVML says of a device, in bytes.

    `own` is None if the driver lists this process under a number that is not known here, as in a container.
    """

    total: int
    free: int
    reserved: int
    own: int | None
    other_processes: int


def driver_memory(index: int) -> DriverMemory | None:
    """Return what NVML says of a CUDA device; None without NVML, or where it does not know the device.

    Args:
        index: the device as torch counts.
    """
    nvml = _nvml()
    if nvml is None:
        return None
    with suppress(Exception):  # NVML has an error for everything that a driver, a container or MIG denies
        device = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")
        memory = nvml.nvmlDeviceGetMemoryInfo(device, version=nvml.nvmlMemory_v2)
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(device)
        by_process = {process.pid: process.usedGpuMemory for process in processes}
        own = _own(by_process)
        other_processes = sum(size or 0 for size in by_process.values()) - (own or 0)
        return DriverMemory(int(memory.total), int(memory.free), int(memory.reserved), own, other_processes)
    return None


def _own(by_process: Mapping[int, int | None]) -> int | None:
    """Return the bytes of this process. One that stands alone in the list is this one: it has a context."""
    if len(by_process) == 1:
        return next(iter(by_process.values()))
    return by_process.get(os.getpid())


@cache
def _nvml() -> ModuleType | None:
    try:
        nvml = import_module("pynvml")
        nvml.nvmlInit()
    except Exception as error:  # not installed, or no driver
        logger.debug("NVML cannot be asked", exc_info=error)
        return None
    return nvml


def counters_in_use() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the counters of the allocators of CUDA and XPU, where they are in use, by the device's name."""
    for kind in MEMORY_STATS:
        backend: Any = getattr(torch, kind, None)
        if backend is not None and backend.is_initialized():
            for index in range(backend.device_count()):
                if (stats := _counters(kind, index)) is not None:
                    yield f"{kind}:{index}", stats


def _counters(kind: str, index: int) -> dict[str, Any] | None:
    read = getattr(BINDINGS, MEMORY_STATS[kind], None)
    return read(index) if read is not None else None


def _of_allocator(stats: dict[str, Any]) -> dict[DevicePart, int]:
    allocated, reserved = (stats[f"{name}_bytes"]["all"]["current"] for name in ("allocated", "reserved"))
    cached = {DevicePart.CACHED: reserved - allocated}
    if "requested_bytes" not in stats:
        return {DevicePart.ALLOCATED: allocated, **cached}
    requested = stats["requested_bytes"]["all"]["current"]
    return {DevicePart.REQUESTED: requested, DevicePart.ROUNDING: allocated - requested, **cached}


_first_outside: dict[tuple[int, str], int] = {}
"""By process and device, what the process had outside PyTorch's allocator when it was first read."""


COUNTERS = {Counter.ALLOCATED: "allocated_bytes", Counter.REQUESTED: "requested_bytes"}


@dataclass(frozen=True, slots=True)
class Level:
    """A counter's bytes now, and its highest value since the program reset it last."""

    current: int
    highest: int


Levels = Mapping[tuple[str, Counter], Level]
"""By device name and counter."""


def allocator_levels() -> Levels:
    """Return the counters of all devices in use, of CUDA's and XPU's allocators."""
    levels: dict[tuple[str, Counter], Level] = {}
    for device, stats in counters_in_use():
        for counter, name in COUNTERS.items():
            if name in stats:
                both = stats[name]["all"]
                levels[device, counter] = Level(both["current"], both["peak"])
    return levels


def highest_between(start: Level, end: Level) -> tuple[int, bool]:
    """Return the highest value between two readings, and whether it is exact, else it is a lower bound.

    The allocator keeps the highest value since the program's last reset. If it rose, the new one is of this
    time; else the value may have come near the old one and gone again.
    """
    if end.highest > start.highest:
        return end.highest, True
    return max(start.current, end.current), False
