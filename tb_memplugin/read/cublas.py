"""What PyTorch allocates for cuBLAS, inside its own allocator (aten/src/ATen/cuda/CublasHandlePool.cpp)."""

from __future__ import annotations

import os
from enum import Enum, auto
from functools import cache

WORKSPACE = 8_519_680
"""Bytes of a cuBLAS workspace before Hopper: 2 buffers of 4 MiB and 8 of 16 KiB."""

LARGE_WORKSPACE = 33_554_432
"""Bytes of a cuBLAS workspace on Hopper and Blackwell."""

MOST_WORKSPACES = {WORKSPACE: 32, LARGE_WORKSPACE: 8}
"""By size, the largest number of blocks that are taken for workspaces; if more have it, none is.

A thread has one per stream with matrix products. After the capture of a CUDA graph there are six: the
forward's thread and autograd's have one each for the streams of the warm-up, the capture and the training.
Tensors have the larger size more often (4,096 x 4,096 of bfloat16).
"""

LT_WORKSPACE = 1_048_576
"""Bytes of a cuBLASLt workspace where it does not share that of cuBLAS."""

KEPT_UNTIL = (2, 15)
"""The first version of PyTorch that allocates workspaces anew for each product (pytorch/pytorch#194311)."""

LT_CAN_SHARE_FROM = (2, 8)
"""The first version where TORCH_CUBLASLT_UNIFIED_WORKSPACE=1 has an effect (pytorch/pytorch#151163)."""

LT_KEPT_FROM = (2, 9)
"""The first version that keeps cuBLASLt's own workspace (pytorch/pytorch#156495)."""

LT_SHARED_FROM = (2, 12)
"""The first version where cuBLASLt shares the workspace of cuBLAS by default (pytorch/pytorch#175879)."""


class LtWorkspace(Enum):
    """Where cuBLASLt, which computes layers with a bias, has its workspace.

    SHARED: it uses that of cuBLAS. KEPT: it keeps one of its own for each handle and stream. PASSING: each
    product allocates one and frees it before it returns.
    """

    SHARED = auto()
    KEPT = auto()
    PASSING = auto()


Version = tuple[int, int]
"""Major and minor version of a PyTorch. Below, None stands for the installed one."""


def keeps_workspaces(torch: Version | None = None) -> bool:
    """Return whether a PyTorch keeps a cuBLAS workspace for each handle (one per thread) and stream.

    Older versions do, and newer ones where TORCH_CUBLAS_WORKSPACE_CACHE=1. Otherwise each product allocates
    its own and frees it before it returns.
    """
    return (torch or _torch_version()) < KEPT_UNTIL or os.environ.get("TORCH_CUBLAS_WORKSPACE_CACHE") == "1"


def lt_workspace(torch: Version | None = None) -> LtWorkspace:
    """Return where cuBLASLt has its workspace in a PyTorch."""
    version, unified = torch or _torch_version(), os.environ.get("TORCH_CUBLASLT_UNIFIED_WORKSPACE")
    if not keeps_workspaces(version):
        return LtWorkspace.PASSING
    if version >= LT_SHARED_FROM:
        return LtWorkspace.KEPT if unified == "0" else LtWorkspace.SHARED
    if version >= LT_CAN_SHARE_FROM and unified == "1":
        return LtWorkspace.SHARED
    return LtWorkspace.KEPT if version >= LT_KEPT_FROM else LtWorkspace.PASSING


def lt_needs_cublas(torch: Version | None = None) -> bool:
    """Return whether a product of cuBLASLt also takes a cuBLAS workspace that is kept."""
    version = torch or _torch_version()
    shares = lt_workspace(version) is LtWorkspace.SHARED
    return keeps_workspaces(version) and (version < LT_SHARED_FROM or shares)


@cache
def _torch_version() -> Version:
    """Return the installed torch's major and minor version, which takes milliseconds to look up."""
    from importlib.metadata import version  # it needs as long as all of this package

    major, minor = map(int, version("torch").split(".")[:2])
    return major, minor
