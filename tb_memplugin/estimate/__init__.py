"""What a run would take: the caching allocator, simulated, and recordings replayed through it."""

from tb_memplugin.estimate.allocator_settings import AllocatorSettings, recorded_settings
from tb_memplugin.estimate.caching_allocator import CachingAllocator
from tb_memplugin.estimate.driver import DeviceMemory
from tb_memplugin.estimate.gpu_spec import GpuSpec
from tb_memplugin.estimate.replay import FirstMiss, Replay, replay
from tb_memplugin.estimate.simulated_trace import simulated_trace

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
