"""Choose the devices that a monitor watches, and read their counters without initializing them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch

from tb_memplugin.errors import MemPluginError
from tb_memplugin.record.arguments import refuse_absent
from tb_memplugin.record.steps.counters import (
    AllocatorCounters,
    Counters,
    Doors,
    ProcessCounters,
    SharedPeaks,
    UntouchedCounters,
    resident_memory,
)
from tb_memplugin.record.torch_private.allocators import (
    ACCELERATOR_RESET,
    ACCELERATOR_STATS,
    BINDINGS,
    MEMORY_STATS,
    RESET_PEAKS,
    is_allocator_initialized,
)
from tb_memplugin.record.torch_private.dispatch import without_torch_functions
from tb_memplugin.record.whole_device.card import free_of

logger = logging.getLogger("tb_memplugin")

PROCESS = "process"
Wanted = str | torch.device


def counters_of(device: Wanted | Sequence[Wanted] | None, *, reset_peaks: bool) -> list[Counters]:
    """Return the counters of the given devices, each once.

    Args:
        device: one or several devices; "cpu" and "process" mean the memory of the process. None: the
            current accelerator if its allocator has counters, else the process.
        reset_peaks: whether peaks may be reset.

    Raises:
        MemPluginError: this machine does not have the device, or its allocator has no counters.
    """
    if device is None:
        device = _default()
    if isinstance(device, str | torch.device) or not isinstance(device, Iterable):
        device = [device]
    several = list(device)
    if not several:
        raise MemPluginError("No device was given.", where="device", fix="Leave it out for the current one.")
    with without_torch_functions():  # a mode of the program would see `torch.device`
        return [_counters(name, reset_peaks) for name in dict.fromkeys(map(_name, several))]


def _default() -> str:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return accelerator.type if accelerator is not None and _counts(accelerator.type) else PROCESS


def _counts(device_type: str) -> bool:
    """Whether a device type's allocator has counters; those of some accelerators (MPS) do not."""
    doors = _doors(device_type)
    if device_type in ("cuda", "xpu") or not doors.present():
        return doors.present()
    try:
        return bool(getattr(doors.module, doors.readers[0])(0))
    except RuntimeError:
        return False


def _name(device: Wanted) -> str:
    name = str(device)
    try:
        return PROCESS if name == PROCESS or torch.device(name).type == "cpu" else name
    except RuntimeError as error:
        raise MemPluginError(
            f"{name!r:.80} is not a device.",
            where="MemoryMonitor",
            fix='Give a device as torch.device takes it, such as "cuda:0", or "process".',
        ) from error


def _counters(name: str, reset_peaks: bool) -> Counters:
    if name == PROCESS:
        return ProcessCounters(resident_memory(), reset_peaks=reset_peaks)
    handle = AcceleratorHandle(torch.device(name))
    doors = _doors(handle.type)
    refuse_absent(
        torch.device(name),
        where="MemoryMonitor",
        fix="Leave `device` out to watch the current device, or the process if there is none.",
    )
    if not hasattr(doors.module, doors.readers[0]):
        raise MemPluginError(
            f"This version of torch cannot read the allocator's counters of {name!r}.",
            where="MemoryMonitor",
            fix='Use device="process" for the memory of the process, or use a newer torch.',
        )
    if reset_peaks and doors.present():
        return AllocatorCounters(handle, lambda: _shared_peaks(handle.type))
    if reset_peaks:
        logger.warning(
            "This version of torch cannot reset peaks, so the peaks of steps are lower bounds "
            "unless they rise."
        )
    return UntouchedCounters(handle, getattr(doors.module, doors.readers[0]))


class AcceleratorHandle:
    """A torch device, given by its type and an index; without an index, the current device of the type.

    Args:
        device: "cuda", "cuda:1", "xpu", ...
    """

    def __init__(self, device: torch.device) -> None:
        self.type = device.type
        self._index: int | None = device.index
        self.name = f"{device.type}:{device.index or 0}"

    def in_use(self) -> bool:
        """Return whether the process uses devices of this type, without initializing them."""
        backend: Any = getattr(torch, self.type, None)
        if hasattr(backend, "is_initialized"):
            return bool(backend.is_initialized())
        return is_allocator_initialized()

    def resolve(self) -> tuple[int, str, str, int | None]:
        """Return the device's index, name, product, and capacity in bytes."""
        index = torch.accelerator.current_device_index() if self._index is None else self._index
        properties: Any = None
        backend: Any = getattr(torch, self.type, None)
        if hasattr(backend, "get_device_properties"):
            properties = backend.get_device_properties(index)
        return (
            index,
            f"{self.type}:{index}",
            str(getattr(properties, "name", "")),
            getattr(properties, "total_memory", None),
        )

    def free(self, index: int) -> tuple[int, int] | None:
        """Return the free and all bytes of the device."""
        return free_of(self.type, index)


@cache
def _shared_peaks(device_type: str) -> SharedPeaks:
    """Return the shared peaks of a device type, one per process, so that torch is wrapped only once."""
    return SharedPeaks(_doors(device_type))


def _doors(device_type: str) -> Doors:
    """Return torch's functions that read and reset an allocator's counters (torch 2.6 to 2.13)."""
    if device_type not in MEMORY_STATS:
        return Doors(BINDINGS, (ACCELERATOR_STATS,), (ACCELERATOR_RESET,))
    return Doors(
        BINDINGS,
        (MEMORY_STATS[device_type], ACCELERATOR_STATS),
        (RESET_PEAKS[device_type], ACCELERATOR_RESET),
    )
