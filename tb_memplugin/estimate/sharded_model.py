"""A model of transformers on one rank of a mesh: dp, fsdp and tp, as people shard such models.

| dimension | what is done |
|---|---|
| dp | the model in `DistributedDataParallel`; with fsdp replicas of the sharded model (HSDP) |
| fsdp | `fully_shard` around every repeated layer, and around the model |
| tp | transformers' own plan for the model (`base_model_tp_plan`) |
| ep, alone | see expert_parallel.py |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.expert_parallel import EXPERTS, by_experts
from tb_memplugin.estimate.repeated_blocks import repeated_blocks
from tb_memplugin.estimate.workload import OWN_CHECKPOINTING

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DIMENSIONS = ("dp", "fsdp", "tp")
NOTE = "The batch is each rank's own. "


def sharded(model: Any, mesh: DeviceMesh) -> tuple[nn.Module, str]:
    """What a rank has of a model, and a sentence on how it was sharded.

    Raises:
        MemPluginError: the mesh has other dimensions, or the model has no plan for one of them.
    """
    names = mesh.mesh_dim_names or ()
    if names == (EXPERTS,):
        return model, by_experts(model, mesh)
    _refuse_other_dimensions(names)
    told = []
    if "tp" in names:
        _by_tensors(model, mesh["tp"])
        told.append("tensor parallelism by transformers' plan")
    if "fsdp" in names:
        layers = _fully_sharded(model, mesh["dp", "fsdp"] if "dp" in names else mesh["fsdp"])
        told.append(f"fully_shard around {layers} layers and the model")
    elif "dp" in names:
        model = _replicated(model, mesh["dp"])
        told.append("DistributedDataParallel")
    return model, f"{NOTE}Sharded by {', '.join(told)}."


def _by_tensors(model: Any, mesh: DeviceMesh) -> None:
    plan = getattr(model, "tp_plan", None)
    if not plan:
        raise MemPluginError(
            f"{type(model).__name__} has no plan for tensor parallelism (base_model_tp_plan in its config).",
            where="--mesh",
            fix="Use fsdp instead of tp, or a function with a parameter named mesh.",
        )
    try:
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism
    except ImportError as error:
        raise MemPluginError(
            "This version of transformers cannot shard a model that it built from a config.",
            where="--mesh",
            fix="Use transformers 5.21 or newer, or a function with a parameter named mesh.",
        ) from error
    apply_tensor_parallelism(model, mesh, model._expand_parallel_plan(plan))


def _fully_sharded(model: nn.Module, mesh: DeviceMesh) -> int:
    from torch.distributed.fsdp import fully_shard

    layers = repeated_blocks(model)
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return len(layers)


def _replicated(model: Any, mesh: DeviceMesh) -> nn.Module:
    from torch.nn.parallel import DistributedDataParallel

    wrapped: Any = DistributedDataParallel(model, process_group=mesh.get_group())
    for name in OWN_CHECKPOINTING:
        if callable(way := getattr(model, name, None)):
            setattr(wrapped, name, way)
    return wrapped  # type: ignore[no-any-return]  # it got attributes


def _refuse_other_dimensions(names: tuple[str, ...]) -> None:
    fix = (
        "Use dp, fsdp, tp, fsdp with tp, or dp with fsdp; pp or ep alone; or a function with a parameter "
        "named mesh."
    )
    if others := [name for name in names if name not in DIMENSIONS]:
        raise MemPluginError(
            f"A model of a config is not divided along {', '.join(others)[:80]}"
            + (" together with other dimensions." if {"pp", EXPERTS} & {*others} else "."),
            where="--mesh",
            fix=fix,
        )
    if "tp" in names and "dp" in names and "fsdp" not in names:
        raise MemPluginError(
            "DistributedDataParallel does not take a model with tensor parallelism.", where="--mesh", fix=fix
        )
