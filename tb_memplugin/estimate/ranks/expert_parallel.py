"""Experts of transformers' models divided over the ranks of an `ep` mesh, by transformers' own plan.

As its `DistributedConfig(fsdp_size=n, ep_size=n)` does: every rank has its own batch and an n-th of the
experts, tokens go to their experts by all-to-all and come back, and all that is no expert is sharded by FSDP2
over the same ranks. With `fsdp` beside it, m groups of n ranks: all that is no expert is sharded over m x n
of them (`fsdp_size=m*n`), and each expert over the m that have it; with `dp`, replicas (`dp_replicate_size`).
With `tp`, t neighbours share a batch and all that is no expert; each sends a t-th of the tokens, and experts,
which are never cut, are divided over n x t ranks (`tp_size=t, ep_size=n*t`). With `pp`, that in each stage.
Which expert a token goes to is a matter of values: here as many rows go to each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.hints import Hints, Question, answer
from tb_memplugin.estimate.ranks.mesh import PIPELINE

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

EXPERTS = "ep"
"""The dimension of the mesh."""

ORDER = (PIPELINE, "dp", "fsdp", EXPERTS, "tp")
"""Of the dimensions beside it: ranks that exchange most are neighbours."""

ASKS = "transformers/distributed/expert_parallel.py"
"""Where transformers reads how many rows go to each rank, and come from it."""


@contextmanager
def refusing_old_transformers() -> Iterator[None]:
    """Around the look-up of what only new versions have.

    Raises:
        MemPluginError: this one has it not.
    """
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise MemPluginError(
            "This version of transformers cannot divide a model that it built from a config.",
            where="--mesh",
            fix="Use transformers 5.21 or newer, or a function with a parameter named mesh.",
        ) from error


@dataclass(frozen=True, slots=True)
class ExpertMesh:
    """How many ranks stand along each dimension; `views` are transformers' own of the same ranks."""

    stages: int
    replicas: int
    shards: int
    experts: int
    tensors: int
    views: Any

    @classmethod
    def of(cls, mesh: DeviceMesh) -> ExpertMesh:
        """As a mesh says, with dimensions in `ORDER`.

        Raises:
            MemPluginError: transformers is too old.
        """
        with refusing_old_transformers():
            from transformers.distributed.expert_parallel import apply_expert_parallelism  # noqa: F401
            from transformers.distributed.utils import TransformersDeviceMesh
        told = dict(zip(mesh.mesh_dim_names or (), mesh.mesh.shape, strict=True))
        stages, replicas, shards, experts, tensors = (told.get(name, 1) for name in ORDER)
        views = _views(mesh.device_type, stages, replicas, shards, experts, tensors)
        return cls(stages, replicas, shards, experts, tensors, TransformersDeviceMesh(*views))

    @property
    def config(self) -> Any:
        """The same in transformers' words, within one stage."""
        from transformers.distributed.configuration_utils import DistributedConfig

        return DistributedConfig(
            dp_replicate_size=self.replicas,
            fsdp_size=self.shards * self.experts,
            tp_size=self.tensors,
            ep_size=self.experts * self.tensors,
        )

    @property
    def dense(self) -> DeviceMesh:
        """The ranks over which all that is no expert is sharded."""
        return self._within("fsdp")

    @property
    def copies(self) -> DeviceMesh:
        """The ranks that have the same experts, over which these are sharded."""
        return self._within("efsdp")

    def _within(self, name: str) -> DeviceMesh:
        found = self.views.get_mesh(("dp_replicate", name) if self.replicas > 1 else name)
        return found  # type: ignore[no-any-return]  # transformers is not followed

    @property
    def told(self) -> str:
        """A sentence on what is done."""
        dense = f"sharded over {self.shards * self.experts} by fully_shard"
        if self.tensors > 1:
            dense = f"divided over {self.tensors} by its plan for tensors and {dense}"
        more = f", in {self.replicas} replicas" if self.replicas > 1 else ""
        return (
            f"Experts are divided over {self.experts * self.tensors} ranks by transformers' plan, all else "
            f"is {dense}{more}."
        )


def by_experts(model: Any, mesh: DeviceMesh) -> str:
    """Divide a whole model's experts, and shard the rest; a sentence on what was done.

    Raises:
        MemPluginError: the model has no plan for it, or not as many experts; or transformers is too old.
    """
    _refuse_without_plan(model)
    ranks = ExpertMesh.of(mesh)
    try:
        model.maybe_distribute_model(model, ranks.config, ranks.views)
    except ValueError as error:
        raise _cannot_be(error) from error
    return ranks.told


def divided_experts(model: Any, mesh: DeviceMesh) -> tuple[ExpertMesh, tuple[nn.Module, ...]]:
    """Divide a whole model's experts, and its tensors with `tp`, before a stage is cut out of it.

    Returns:
        The ranks, and the modules that hold experts.

    Raises:
        MemPluginError: as `by_experts`.
    """
    _refuse_without_plan(model)
    ranks = ExpertMesh.of(mesh)
    from transformers.distributed.expert_parallel import apply_expert_parallelism
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    try:
        by_tensors, plan, _ = model._resolve_parallel_plans(ranks.config)
        if ranks.tensors > 1:
            apply_tensor_parallelism(model, ranks.views.get_mesh("tp"), by_tensors)
        apply_expert_parallelism(model, ranks.views.get_mesh("ep"), ranks.views.get_mesh("tp"), plan)
    except ValueError as error:
        raise _cannot_be(error) from error
    names = [name for name, style in plan.items() if style == "ep_dispatch_experts"]
    return ranks, tuple(model.get_submodule(name) for name in names)


def shard_experts(stage: nn.Module, experts: Sequence[nn.Module], ranks: ExpertMesh) -> None:
    """Shard those of the experts that a stage has, as transformers does in whole models."""
    from torch.distributed.fsdp import fully_shard

    here = set(stage.modules())
    for module in experts:
        if module in here:
            sharded: Any = fully_shard(module, mesh=ranks.copies, reshard_after_forward=True)
            sharded.set_gradient_divide_factor(float(ranks.config.dp_size))
            if ranks.shards > 1:
                sharded.set_force_sum_reduction_for_comms(True)


def even_routing(
    config: Any, tokens: float, ranks: int, hints: Hints = None
) -> tuple[Callable[[Question], Any], str]:
    """Hints that send as many rows to each rank where the user's say nothing, and a sentence that says so.

    Args:
        config: of the model.
        tokens: that a rank sends at once.
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


def _refuse_without_plan(model: Any) -> None:
    if not getattr(model, "ep_plan", None):
        raise MemPluginError(
            f"{type(model).__name__} has no plan for expert parallelism (base_model_ep_plan in its config).",
            where="--mesh",
            fix="Use fsdp or tp, or a function with a parameter named mesh.",
        )


def _cannot_be(error: ValueError) -> MemPluginError:
    return MemPluginError(
        f"transformers cannot divide the model: {error}", where="--mesh", fix="Choose another ep."
    )


def _views(
    device: str, stages: int, replicas: int, shards: int, experts: int, tensors: int
) -> tuple[DeviceMesh, DeviceMesh]:
    """The same ranks as layers that are sharded see them, and as experts do."""
    from torch.distributed.device_mesh import init_device_mesh

    dense = (stages, replicas, shards * experts, tensors)
    divided = (stages, replicas, shards, experts * tensors)
    return (
        init_device_mesh(device, dense, mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp")),
        init_device_mesh(device, divided, mesh_dim_names=("pp", "dp_replicate", "efsdp", EXPERTS)),
    )
