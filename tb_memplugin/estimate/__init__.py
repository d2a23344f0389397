"""Estimate the memory of a run without a GPU: the model runs on fake tensors, the allocator is simulated.

`answer/` is what is asked and answered (start with `estimator.py` there), `run/` the run on fake tensors,
`kernels/` what kernels allocate, `program/` what makes a program run, `libraries/` other libraries, and
`ranks/` jobs of several ranks.
"""

from tb_memplugin.estimate.gpu_spec import GpuSpec
from tb_memplugin.simulator import (
    AllocatorSettings,
    CachingAllocator,
    DeviceMemory,
    FirstMiss,
    Replay,
    recorded_settings,
    replay,
    simulated_trace,
)

__all__ = [
    "AllocatorSettings",
    "CachingAllocator",
    "DeviceMemory",
    "FirstMiss",
    "GpuSpec",
    "Replay",
    "recorded_settings",
    "replay",
    "simulated_trace",
]
