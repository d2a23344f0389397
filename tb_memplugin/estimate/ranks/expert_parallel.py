"""Experts of transformers' models divided over the ranks of an `ep` mesh, by transformers' own plan.

As its `DistributedConfig(fsdp_size=n, ep_size=n)` does: every rank has its own batch and an n-th of the
experts, tokens go to their experts by all-to-all and come back, and all that is no expert is sharded by FSDP2
over the same ranks. With `fsdp` beside it, m groups of n ranks: all that is no expert is sharded over m x n
of them (`fsdp_size=m*n`), and each expert over the m that have it; with `dp`, replicas (`dp_replicate_size`).
Which expert a token goes to is a matter of values: here as many rows go to each rank.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.hints import Hints, Question, answer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

EXPERTS = "ep"
"""The dimension of the mesh."""

AROUND = ((EXPERTS,), ("fsdp", EXPERTS), ("dp", EXPERTS), ("dp", "fsdp", EXPERTS))
"""The meshes: ranks that exchange tokens are neighbours."""

ASKS = "transformers/distributed/expert_parallel.py"
"""Where transformers reads how many rows go to each rank, and come from it."""


def by_experts(model: Any, mesh: DeviceMesh) -> str:
    """Divide a model's experts, and shard the rest; a sentence on what was done.

    Raises:
        MemPluginError: the model has no plan for it, or not as many experts; or transformers is too old.
    """
    if not getattr(model, "ep_plan", None):
        raise MemPluginError(
            f"{type(model).__name__} has no plan for expert parallelism (base_model_ep_plan in its config).",
            where="--mesh",
            fix="Use fsdp or tp, or a function with a parameter named mesh.",
        )
    try:
        from transformers.distributed.configuration_utils import DistributedConfig
        from transformers.distributed.utils import TransformersDeviceMesh
    except ImportError as error:
        raise MemPluginError(
            "This version of transformers does not divide experts over ranks.",
            where="--mesh",
            fix="Use transformers 5.21 or newer, or a function with a parameter named mesh.",
        ) from error
    sizes = dict(zip(mesh.mesh_dim_names or (), mesh.mesh.shape, strict=True))
    replicas, shards, experts = sizes.get("dp", 1), sizes.get("fsdp", 1), sizes[EXPERTS]
    config = DistributedConfig(dp_replicate_size=replicas, fsdp_size=shards * experts, ep_size=experts)
    views = _views(mesh.device_type, replicas, shards, experts)
    try:
        model.maybe_distribute_model(model, config, TransformersDeviceMesh(*views))
    except ValueError as error:
        raise MemPluginError(
            f"transformers cannot divide the model: {error}", where="--mesh", fix="Choose another ep."
        ) from error
    more = f", in {replicas} replicas" if replicas > 1 else ""
    return (
        f"Experts are divided over {experts} ranks by transformers' plan, all else is sharded over "
        f"{shards * experts} by fully_shard{more}. The batch is each rank's own."
    )


def even_routing(
    config: Any, tokens: int, ranks: int, hints: Hints = None
) -> tuple[Callable[[Question], Any], str]:
    """Hints that send as many rows to each rank where the user's say nothing, and a sentence that says so.

    Args:
        config: of the model.
        tokens: of a rank's batch.
        ranks: that exchange tokens.
        hints: the user's.
    """
    each = max(1, round(tokens * getattr(config, "num_experts_per_tok", 1) / ranks))

    def rows(asked: Question) -> Any:
        if (told := answer(hints, asked)) is not None:
            return told
        here = asked.kind == "count" and Path(asked.file).as_posix().endswith(ASKS)
        return each if here else None

    return rows, (
        "Which expert a token goes to depends on values: taken to be even, "
        f"{each:,} rows from each rank to each. A rank whose experts are liked better needs more."
    )


def _views(device: str, replicas: int, shards: int, experts: int) -> tuple[DeviceMesh, DeviceMesh]:
    """The same ranks as layers that are sharded see them, and as experts do."""
    from torch.distributed.device_mesh import init_device_mesh

    dense, divided = (1, replicas, shards * experts, 1), (1, replicas, shards, experts)
    return (
        init_device_mesh(device, dense, mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp")),
        init_device_mesh(device, divided, mesh_dim_names=("pp", "dp_replicate", "efsdp", EXPERTS)),
    )
