"""The environment in which a process finds the stand-in instead of a GPU."""

from __future__ import annotations

import os
from pathlib import Path

from tb_memplugin.dryrun.build import StandIn
from tb_memplugin.estimate.gpu_spec import GpuSpec
from tb_memplugin.estimate.libraries.cudnn.questions import described


def environment(
    built: StandIn,
    gpu: GpuSpec,
    folder: Path,
    *,
    devices: int = 1,
    unlimited: bool = False,
    asks_cudnn: bool = True,
) -> dict[str, str]:
    """Return the variables of a process for which `devices` GPUs of one kind are there.

    Args:
        built: the compiled stand-in.
        gpu: the GPU that the stand-in says it is.
        folder: where processes of several ranks leave messages for each other.
        devices: how many GPUs there are.
        unlimited: whether requests beyond a GPU's memory succeed.
        asks_cudnn: whether the installed cuDNN chooses kernels and sizes workspaces; else they are 0.
    """
    earlier = os.environ.get("LD_LIBRARY_PATH", "")
    return {
        **os.environ,
        "LD_PRELOAD": str(built.preloaded),
        "LD_LIBRARY_PATH": os.pathsep.join([str(built.libraries), *([earlier] if earlier else [])]),
        "STANDIN_DEVICE": _device(gpu),
        "STANDIN_CUDNN_DEVICE": described(gpu),
        "STANDIN_CUDNN_WORKSPACES": str(int(asks_cudnn)),
        "STANDIN_DEVICES": str(devices),
        "STANDIN_UNLIMITED": str(int(unlimited)),
        "STANDIN_FOLDER": str(folder),
    }


def _device(gpu: GpuSpec) -> str:
    """Return a GPU as `target` of cudart.cpp reads it."""
    major, minor = gpu.compute_capability
    numbers = (major, minor, gpu.processors, gpu.threads, gpu.blocks, gpu.shared_bytes, gpu.memory_bytes)
    return f"{' '.join(map(str, numbers))} {gpu.driver_name}"
