"""Experts of transformers' models divided over the ranks of an `ep` mesh, by transformers' own plan.

As its `DistributedConfig(fsdp_size=n, ep_size=n)` does: every rank has its own batch and an n-th of the
experts, tokens go to their experts by all-to-all and come back, and all that is no expert is sharded by FSDP2
over the same ranks. Which expert a token goes to is a matter of values: here as many rows go to each rank.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.hints import Question

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

EXPERTS = "ep"
"""The dimension of the mesh."""

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
    size = mesh.size()
    try:
        model.maybe_distribute_model(
            model, DistributedConfig(fsdp_size=size, ep_size=size), TransformersDeviceMesh(*_views(mesh))
        )
    except ValueError as error:
        raise MemPluginError(
            f"transformers cannot divide the model: {error}", where="--mesh", fix="Choose another ep."
        ) from error
    return (
        f"Experts are divided over {size} ranks by transformers' plan, all else is sharded over them by "
        "fully_shard. The batch is each rank's own."
    )


def even_routing(config: Any, tokens: int, ranks: int) -> tuple[Callable[[Question], Any], str]:
    """Hints that send as many rows to each rank, and a sentence that says so.

    Args:
        config: of the model.
        tokens: of a rank's batch.
        ranks: among which the experts are divided.
    """
    each = max(1, round(tokens * getattr(config, "num_experts_per_tok", 1) / ranks))

    def rows(asked: Question) -> int | None:
        here = asked.kind == "count" and Path(asked.file).as_posix().endswith(ASKS)
        return each if here else None

    return rows, (
        "Which expert a token goes to depends on values: taken to be even, "
        f"{each:,} rows from each rank to each. A rank whose experts are liked better needs more."
    )


def _views(mesh: DeviceMesh) -> tuple[DeviceMesh, DeviceMesh]:
    """The same ranks as layers that are sharded see them, and as experts do."""
    from torch.distributed.device_mesh import init_device_mesh

    size, kind = mesh.size(), mesh.device_type
    return (
        init_device_mesh(kind, (1, 1, size, 1), mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp")),
        init_device_mesh(kind, (1, 1, 1, size), mesh_dim_names=("pp", "dp_replicate", "efsdp", EXPERTS)),
    )
