"""Describe a GPU to cuDNN, as the JSON representation of CUDNN_BACKEND_DEVICEPROP_DESCRIPTOR.

cuDNN refuses a description that lacks a key. Which keys change what it answers is in docs/gpus.md; the others
have the values of any GPU.
"""

from __future__ import annotations

import json

from tb_memplugin.estimate.gpu_spec import GpuSpec

CLOCKS = {"h100": (1980, 2619), "h100-nvl": (1785, 2619), "h200": (1980, 3201)}
"""MHz of multiprocessors and of memory, where they change answers (docs/gpus.md)."""


def described(gpu: GpuSpec) -> str:
    """Return the description of a GPU."""
    major, minor = gpu.compute_capability
    clock, memory_clock = CLOCKS.get(gpu.name, (1410, 1215))
    return json.dumps(
        {
            "deviceVer": 100 * major + 10 * minor,
            "multiProcessorCount": gpu.processors,
            "maxSharedMemoryPerBlockOptin": gpu.shared_bytes,
            "maxThreadsPerSM": gpu.threads,
            "maxCtasPerSM": 32,
            "totalGlobalMem": gpu.memory_bytes,
            "smClockRateKHz": 1000 * clock,
            "memClockRateKHz": 1000 * memory_clock,
            "l2CacheSize": 40 << 20,
            "reservedSharedMemoryPerBlock": 1024 if major >= 8 else 0,
            "warpSize": 32,
            "maxSharedMemoryPerBlock": 48 << 10,
            "maxRegistersPerSM": 65536,
            "maxThreadsPerBlock": 1024,
            "regsPerBlock": 65536,
            "maxBlockSize": [1024, 1024, 64],
            "maxGridSize": [2147483647, 65535, 65535],
            "supportCoopLaunch": 1,
            "pciDeviceId": 0,
            "isTccDriver": 0,
            "cudaDeviceId": 0,
            "driverVer": 13000,
            "deviceName": gpu.name,
        }
    )
