"""torch.distributed's meshes and DTensors: their bookkeeping is real, and takes no memory of the device.

A `DeviceMesh` keeps its ranks in a small tensor on the CPU and reads its values, which a fake tensor does not
have. DTensor learns the whole tensor's shape by running each operator once on fake tensors of the whole size;
no rank ever allocates those.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from tb_memplugin.estimate.patches import Patches

_READS_RANKS = (
    "_compute_coordinate_on_dim",
    "_create_flatten_mesh",
    "_create_sub_mesh",
    "_create_unflatten_mesh",
    "_get_all_submeshes",
    "_get_mesh_tensor_from_full_mesh",
    "_init_process_groups",
    "_setup_world_group_and_device",
    "from_group",
    "mesh",
)
"""What of DeviceMesh (torch 2.13) computes with the tensor of its ranks."""


class DeviceMeshes:
    """DeviceMesh, DTensor, and with them tensor parallelism and FSDP2."""

    name = "torch.distributed.tensor"

    def applies(self) -> bool:
        """Whether this process is a rank, as in `estimate_ranks`; else it would cost a second of imports."""
        return dist.is_available() and dist.is_initialized()

    @contextmanager
    def patch(self) -> Iterator[None]:
        """Let meshes be real, and DTensor's search for shapes be nobody's memory."""
        from torch.distributed import device_mesh
        from torch.distributed.tensor._sharding_prop import ShardingPropagator

        patches = Patches()
        try:
            for name in _READS_RANKS:
                _replace(patches, device_mesh.DeviceMesh, name, _really)
            _replace(patches, device_mesh.DeviceMesh, "__init__", _with_real_ranks)
            _replace(patches, ShardingPropagator, "_propagate_tensor_meta_non_cached", _really)
            yield
        finally:
            patches.undo()


def _replace(patches: Patches, owner: Any, name: str, around: Callable[[Any], Any]) -> None:
    """Put something around a method, where this version of torch has it."""
    method = vars(owner).get(name)
    if isinstance(method, staticmethod | classmethod):
        patches.set(owner, name, type(method)(around(method.__func__)))
    elif isinstance(method, property):
        patches.set(owner, name, property(around(method.fget)))
    elif method is not None:
        patches.set(owner, name, around(method))


def _really(method: Any) -> Any:
    """A method whose tensors are real, or fake in nobody's eyes, also while an estimate runs."""

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return method(*args, **kwargs)

    return run


def _with_real_ranks(init: Any) -> Any:
    """`DeviceMesh.__init__`: `init_device_mesh` gives it 0, 1, 2, ... in a tensor that is fake here."""

    @functools.wraps(init)
    def run(mesh: Any, *args: Any, **kwargs: Any) -> None:
        ranks = kwargs.get("_rank_map")
        with _disable_current_modes():
            if isinstance(ranks, FakeTensor):
                kwargs["_rank_map"] = torch.arange(ranks.numel(), dtype=torch.int, device="cpu")
            init(mesh, *args, **kwargs)

    return run
