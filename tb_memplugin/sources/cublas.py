"""What PyTorch allocates for cuBLAS, inside its own allocator (aten/src/ATen/cuda/CublasHandlePool.cpp)."""

from __future__ import annotations

import os
from functools import cache
from importlib.metadata import version

WORKSPACE = 8_519_680
"""Bytes of a cuBLAS workspace before Hopper: 2 buffers of 4 MiB and 8 of 16 KiB."""

LARGE_WORKSPACE = 33_554_432
"""Bytes of a cuBLAS workspace on Hopper and Blackwell."""

LT_WORKSPACE = 1_048_576
"""Bytes of a cuBLASLt workspace where it does not share that of cuBLAS."""

KEPT_UNTIL = (2, 15)
"""The first version of PyTorch that allocates workspaces anew for each product (pytorch/pytorch#194311)."""


def keeps_workspaces() -> bool:
    """Return whether this PyTorch keeps a workspace for each handle (one per thread) and stream.

    Older versions do, and newer ones where TORCH_CUBLAS_WORKSPACE_CACHE=1. cuBLASLt then shares the workspace
    of cuBLAS. Otherwise each product allocates its own and frees it before it returns.
    """
    return _torch_version() < KEPT_UNTIL or os.environ.get("TORCH_CUBLAS_WORKSPACE_CACHE") == "1"


@cache
def _torch_version() -> tuple[int, int]:
    """Return the installed torch's major and minor version, which takes milliseconds to look up."""
    major, minor = map(int, version("torch").split(".")[:2])
    return major, minor
