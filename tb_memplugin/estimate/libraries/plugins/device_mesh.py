"""DeviceMesh and DTensor: their bookkeeping uses real tensors, and is not counted as device memory.

A `DeviceMesh` keeps its ranks in a small CPU tensor and reads its values, which a fake tensor does not have.
DTensor finds out shapes by running each operator once on fake tensors of the whole size, which no rank ever
allocates.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from tb_memplugin.estimate.run.patches import Patches
from tb_memplugin.record.torch_private.dispatch import without_modes

_READS_RANKS = (
    *("_compute_coordinate_on_dim", "_create_flatten_mesh", "_create_sub_mesh", "_create_unflatten_mesh"),
    *("_get_all_submeshes", "_get_mesh_tensor_from_full_mesh", "_init_process_groups"),
    *("_setup_world_group_and_device", "from_group", "mesh"),
)
"""Members of DeviceMesh (torch 2.13) that compute with the tensor of its ranks."""


class DeviceMeshes:
    """The plugin for DeviceMesh and DTensor, which tensor parallelism and FSDP2 use."""

    name = "torch.distributed.tensor"

    def applies(self) -> bool:
        """Return whether this process is a rank, as in `estimate_ranks`. If not, skip a second of imports."""
        return dist.is_available() and dist.is_initialized()

    @contextmanager
    def patch(self) -> Iterator[None]:
        """Make meshes use real tensors, and do not count the tensors with which DTensor finds out shapes."""
        from torch.distributed import device_mesh
        from torch.distributed.tensor._sharding_prop import ShardingPropagator

        patches = Patches()
        try:
            for name in _READS_RANKS:
                _replace(patches, device_mesh.DeviceMesh, name, really)
            _replace(patches, device_mesh.DeviceMesh, "__init__", _with_real_ranks)
            _replace(patches, ShardingPropagator, "_propagate_tensor_meta_non_cached", really)
            yield
        finally:
            patches.undo()


def _replace(patches: Patches, owner: Any, name: str, around: Callable[[Any], Any]) -> None:
    """Wrap a method or property, if this version of torch has it."""
    method = vars(owner).get(name)
    if isinstance(method, staticmethod | classmethod):
        patches.set(owner, name, type(method)(around(method.__func__)))
    elif isinstance(method, property):
        patches.set(owner, name, property(around(method.fget)))
    elif method is not None:
        patches.set(owner, name, around(method))


def really(method: Any) -> Any:
    """Wrap a method to run without the estimate's mode: its tensors are real, or fake but not counted."""

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with without_modes():
            return method(*args, **kwargs)

    return run


def _with_real_ranks(init: Any) -> Any:
    """Wrap `DeviceMesh.__init__` to replace a fake tensor of ranks by a real one.

    `init_device_mesh` passes 0, 1, 2, ... in a tensor that is fake in an estimate.
    """

    @functools.wraps(init)
    def run(mesh: Any, *args: Any, **kwargs: Any) -> None:
        ranks = kwargs.get("_rank_map")
        with without_modes():
            if isinstance(ranks, FakeTensor):
                kwargs["_rank_map"] = torch.arange(ranks.numel(), dtype=torch.int, device="cpu")
            init(mesh, *args, **kwargs)

    return run
