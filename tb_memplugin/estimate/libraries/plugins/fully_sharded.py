"""FSDP2 compares addresses to find replaced shards, but fake tensors have no addresses.

FSDP1 runs unchanged in an estimate for a GPU. On a CPU it does not run, as in reality.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.libraries.plugins.device_mesh import really
from tb_memplugin.estimate.libraries.plugins.plugin import replaced

_MESHES = "_get_post_forward_mesh_info"
"""The function that makes the mesh of `reshard_after_forward=n`, by its name in two modules."""


class FullySharded:
    """The plugin for `fully_shard` (FSDP2), and for the error of `FullyShardedDataParallel` on a CPU."""

    name = "torch.distributed.fsdp"

    def applies(self) -> bool:
        """Return whether this process is a rank, as in `estimate_ranks`. If not, skip a second of imports."""
        return dist.is_available() and dist.is_initialized()

    @contextmanager
    def patch(self) -> Iterator[None]:
        """Keep FSDP2 from resetting shards that did not change, and let it move fake models to the GPU.

        It would pad a smaller shard a second time (`FSDPParam.reset_sharded_param`). Meshes of
        `reshard_after_forward=n` keep real ranks.
        """
        from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

        begin: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_init")
        fully: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fully_shard")
        older: Any = importlib.import_module("torch.distributed.fsdp.fully_sharded_data_parallel")

        original: Any = FSDPParam.reset_sharded_param

        @functools.wraps(original)
        def reset_sharded_param(shard: Any) -> None:
            if not _unchanged(shard):
                original(shard)

        with replaced(
            (FSDPParam, "reset_sharded_param", reset_sharded_param),
            (begin, "_move_states_to_device", _moving_fakes(begin._move_states_to_device)),
            *((home, _MESHES, really(getattr(home, _MESHES))) for home in (begin, fully)),
            (older, "_init_device_handle", _requiring_gpu(older._init_device_handle)),
        ):
            yield


def _moving_fakes(original: Any) -> Any:
    """Wrap FSDP2's move of a model to its device: assigning to `.data` keeps a fake tensor's device."""

    @functools.wraps(original)
    def run(parameters: list[Any], buffers: list[Any], device: torch.device) -> None:
        for tensor in (*parameters, *buffers):
            if isinstance(tensor, FakeTensor) and tensor.device not in (device, torch.device("meta")):
                moved: Any = tensor.to(device)
                tensor.data = moved
                tensor.fake_device = moved.fake_device
        original(parameters, buffers, device)

    return run


def _requiring_gpu(find_device: Any) -> Any:
    """Wrap FSDP1's search for a GPU to raise a MemPluginError if there is none."""

    @functools.wraps(find_device)
    def run(*args: Any, **keywords: Any) -> Any:
        try:
            return find_device(*args, **keywords)
        except RuntimeError as error:
            raise MemPluginError(
                f"FullyShardedDataParallel (FSDP1) runs only on a GPU: {error}",
                where="FullyShardedDataParallel",
                fix="Use torch.distributed.fsdp.fully_shard (FSDP2), or estimate with device='cuda'.",
            ) from error

    return run


def _unchanged(shard: Any) -> bool:
    """Whether the module's parameter is still the shard's own, in the same memory."""
    info = shard._module_info
    parameter = getattr(info.module, info.param_name)
    if parameter is not shard.sharded_param or shard.pin_memory:
        return False
    mine, its = shard._sharded_param_data, parameter._local_tensor
    return bool(mine.untyped_storage()._cdata == its.untyped_storage()._cdata)
