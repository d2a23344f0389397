"""What a run would take: a model in fake tensors, and the caching allocator, simulated.

`estimator.py` is the beginning; `corrections/` is what fake tensors alone get wrong, `plugins/` what
libraries need, `simulator/` the allocator and the replay of recordings, `ranks/` the jobs of several ranks.
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
