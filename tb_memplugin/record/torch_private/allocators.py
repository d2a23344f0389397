"""Private names of the device allocators: their counters and their own history.

They are looked up when they are used: a build of torch has those of its devices alone.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch

from tb_memplugin.record.torch_private.table import name

BINDINGS: ModuleType = torch._C
"""The module of torch's functions in C++."""

_NO_COUNTERS = "the counters of the allocator are not known, which MemoryMonitor says"
_NO_PEAKS = "peaks of steps are lower bounds, which MemoryMonitor says"
_NO_HISTORY = "no history is recorded, which the recorder says"
_NO_MARKS = "layers are not marked in the history"


def _of_builds(pattern: str, purpose: str, without: str) -> dict[str, str]:
    return {kind: name(pattern.format(kind), purpose, without, build=kind) for kind in ("cuda", "xpu")}


def _of_memory(function: str, purpose: str, without: str) -> str:
    name(f"torch.xpu.memory.{function}", purpose, without, since="2.10")
    return name(f"torch.cuda.memory.{function}", purpose, without)


MEMORY_STATS = _of_builds("torch._C._{}_memoryStats", "reads an allocator's counters", _NO_COUNTERS)
"""By type of device; of others, `ACCELERATOR_STATS`."""
RESET_PEAKS = _of_builds("torch._C._{}_resetPeakMemoryStats", "resets an allocator's peaks", _NO_PEAKS)
"""By type of device; of others, `ACCELERATOR_RESET`."""
ACCELERATOR_STATS = name(
    "torch._C._accelerator_getDeviceStats", "reads the counters of any device", _NO_COUNTERS, since="2.9"
)
ACCELERATOR_RESET = name(
    "torch._C._accelerator_resetPeakStats", "resets the peaks of any device", _NO_PEAKS, since="2.9"
)
_IS_INITIALIZED = name(
    "torch._C._accelerator_isAllocatorInitialized",
    "whether the process uses a device that is neither CUDA's nor XPU's",
    "MemoryMonitor takes such a device for one that is not used",
    since="2.9",
)
RECORD_HISTORY = _of_memory("_record_memory_history", "turns the history on or off", _NO_HISTORY)
SNAPSHOT = _of_memory("_snapshot", "reads the history", _NO_HISTORY)
SET_MARK = name(
    "torch.cuda.memory._set_memory_metadata", "marks a thread's allocations", _NO_MARKS, since="2.10"
)
MARK = name("torch.cuda.memory._get_memory_metadata", "reads a thread's mark", _NO_MARKS, since="2.10")
LAZY_CALL = name(
    "torch.cuda._lazy_call", "calls a function once a process uses a device", "the history starts at once"
)
HISTORY_ENABLED = _of_builds(
    "torch._C._{}_isHistoryEnabled", "whether the history is on", "an empty history counts as one that is off"
)
OBSERVE_FAILURES = _of_builds(
    "torch._C._{}_attach_out_of_memory_observer",
    "calls a function when an allocation fails",
    "nothing is recorded when an allocation fails",
)


def is_allocator_initialized() -> bool:
    """Whether the process uses an accelerator that is neither CUDA's nor XPU's."""
    read: Callable[[], bool] = getattr(BINDINGS, _IS_INITIALIZED, bool)
    return bool(read())
