"""Simulate PyTorch's caching allocator, and replay recordings through it."""

from tb_memplugin.simulator.allocator_settings import AllocatorSettings, recorded_settings
from tb_memplugin.simulator.caching_allocator import CachingAllocator
from tb_memplugin.simulator.driver import DeviceMemory
from tb_memplugin.simulator.replay import FirstMiss, Replay, replay
from tb_memplugin.simulator.simulated_trace import simulated_trace

__all__ = [
    "AllocatorSettings",
    "CachingAllocator",
    "DeviceMemory",
    "FirstMiss",
    "Replay",
    "recorded_settings",
    "replay",
    "simulated_trace",
]
