"""Shard a model, or a pipeline stage, for one rank of a mesh with dp, fsdp and tp, as users commonly do.

| dimension | what is done |
|---|---|
| dp | the model in `DistributedDataParallel`; with fsdp, replicas of the sharded model (HSDP) |
| fsdp | `fully_shard` around every repeated layer, and around the model |
| tp | transformers' own plan for the model (`base_model_tp_plan`) |
| ep; also with the others | see expert_parallel.py |
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.answer.workload import OWN_CHECKPOINTING, repeated_blocks
from tb_memplugin.estimate.ranks.expert_parallel import (
    EXPERTS,
    ORDER,
    by_experts,
    has_tied_parameters,
    refusing_old_transformers,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DIMENSIONS = ("dp", "fsdp", "tp")
NOTE = "The batch is per rank; ranks that share tensors (tp) or stages (pp) share one batch. "


def sharded(model: Any, mesh: DeviceMesh) -> tuple[nn.Module, str]:
    """Return a rank's part of a model, and a sentence on how the model was sharded.

    Raises:
        MemPluginError: the mesh has unsupported dimensions, or the model has no plan for one of them.
    """
    names = mesh.mesh_dim_names or ()
    refuse_other_dimensions(names)
    if EXPERTS in names:
        return model, NOTE + by_experts(model, mesh)
    ways = [by_tensors(model, mesh)] if "tp" in names else []
    model, more = in_data_parallel(model, mesh)
    return model, f"{NOTE}Sharded by {', '.join([*ways, *more])}."


def in_data_parallel(model: nn.Module, mesh: DeviceMesh) -> tuple[nn.Module, tuple[str, ...]]:
    """Shard a model or a stage along `dp` and `fsdp`; return a rank's part, and the steps taken as texts."""
    names = mesh.mesh_dim_names or ()
    if "fsdp" in names:
        layers = fully_sharded(model, mesh["dp", "fsdp"] if "dp" in names else mesh["fsdp"])
        return model, (f"fully_shard around {layers} layers and the {'stage' if 'pp' in names else 'model'}",)
    if "dp" in names:
        return _replicated(model, mesh["dp"], of_tensors="tp" in names), ("DistributedDataParallel",)
    return model, ()


def by_tensors(model: Any, mesh: DeviceMesh) -> str:
    """Divide a whole model along `tp` by transformers' own plan, and return a text that says so.

    Raises:
        MemPluginError: the model has no plan, or transformers is too old.
    """
    plan = getattr(model, "tp_plan", None)
    if not plan:
        raise MemPluginError(
            f"{type(model).__name__} has no plan for tensor parallelism (base_model_tp_plan in its config).",
            where="--mesh",
            fix="Use fsdp instead of tp, or a function with a parameter named mesh.",
        )
    _refuse_parts_of_heads(model, plan, mesh["tp"].size())
    with refusing_old_transformers():
        from transformers.distributed.tensor_parallel import apply_tensor_parallelism

        _untie(model)
        divided = model._expand_parallel_plan(plan)
    apply_tensor_parallelism(model, mesh["tp"], divided)
    model.tie_weights()
    return "tensor parallelism by transformers' plan"


def _untie(model: Any) -> None:
    """Give tied parameters their own memory until `tie_weights()`: transformers divides models untied."""
    for name in getattr(model, "all_tied_weights_keys", None) or ():
        owner, _, last = name.rpartition(".")
        tied = model.get_parameter(name)
        setattr(model.get_submodule(owner), last, nn.Parameter(torch.empty_like(tied), tied.requires_grad))


def _refuse_parts_of_heads(model: Any, plan: Mapping[str, str], count: int) -> None:
    """Raise if ranks would get parts of attention heads, with which attention cannot run.

    Raises:
        MemPluginError: the number of heads that the plan divides is not a multiple of the number of ranks.
    """
    config = getattr(model.config, "get_text_config", lambda: model.config)()
    for layer, name in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        heads = getattr(config, name, None)
        divided = any(f".{layer}" in f".{key}" and "colwise" in how for key, how in plan.items())
        if divided and heads and heads % count:
            raise MemPluginError(
                f"{heads} heads ({name}) cannot be divided over {count} ranks.",
                where="--mesh",
                fix=f"Use a tp that divides {heads}.",
            )


def fully_sharded(model: nn.Module, mesh: DeviceMesh) -> int:
    """Apply `fully_shard` to every repeated layer and to the model; return the number of layers."""
    from torch.distributed.fsdp import fully_shard

    layers = repeated_blocks(model)
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return len(layers)


def _replicated(model: Any, mesh: DeviceMesh, *, of_tensors: bool) -> nn.Module:
    """Wrap a model in DistributedDataParallel. Given a mesh, torch gives it the local parts of DTensors.

    Raises:
        MemPluginError: tied parameters are divided, which torch would untie.
    """
    from torch.nn.parallel import DistributedDataParallel

    if of_tensors and has_tied_parameters(model):
        raise MemPluginError(
            "DistributedDataParallel does not keep divided parameters tied.",
            where="--mesh",
            fix="Use fsdp instead of dp, or a config with tie_word_embeddings=false.",
        )
    how: dict[str, Any] = {"device_mesh": mesh} if of_tensors else {"process_group": mesh.get_group()}
    wrapped: Any = DistributedDataParallel(model, **how)
    for name in OWN_CHECKPOINTING:
        if callable(way := getattr(model, name, None)):
            setattr(wrapped, name, way)
    return wrapped  # type: ignore[no-any-return]  # it is Any so that attributes can be set


def refuse_other_dimensions(names: tuple[str, ...]) -> None:
    """Raise if a mesh has dimensions that would be ignored.

    Raises:
        MemPluginError: models cannot be divided along one of the names, or not along this combination.
    """
    fix = (
        "Use dp, fsdp, tp, tp with dp or fsdp, or dp with fsdp; each of them also with pp. For experts use "
        f"ep, also with the others. Give them in the order {','.join(ORDER)}. Or use a function with a "
        "parameter named mesh."
    )
    allowed = ORDER if EXPERTS in names else DIMENSIONS
    if unknown := [name for name in names if name not in allowed]:
        raise MemPluginError(
            f"A model cannot be divided along {', '.join(unknown)[:80]}.", where="--mesh", fix=fix
        )
    ordered = [name for name in names if EXPERTS in names or name in ("dp", "fsdp")]
    if sorted(ordered, key=ORDER.index) != ordered:
        raise MemPluginError(
            f"A model cannot be divided over a mesh in this order: {','.join(names)}.",
            where="--mesh",
            fix=fix,
        )
