"""Estimate the memory of a run without a GPU: the model runs on fake tensors, the allocator is simulated.

Start with `estimator.py`. `corrections/` corrects what fake tensors alone get wrong, `plugins/` adapts
libraries, `simulator/` simulates the caching allocator and replays recordings through it, and `ranks/`
estimates jobs of several ranks.
"""

from tb_memplugin.estimate.gpu_spec import GpuSpec
from tb_memplugin.estimate.simulator import (
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
