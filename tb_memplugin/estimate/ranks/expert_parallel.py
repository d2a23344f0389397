"""Divide the experts of transformers models over the ranks of an `ep` mesh, by transformers' own plan.

`ep=n` means `DistributedConfig(fsdp_size=n, ep_size=n)`: every rank has its own batch and 1/n of the experts,
an all-to-all sends tokens to their experts and back, and FSDP2 shards the other parameters over the same
ranks. Other dimensions can be added:

- `fsdp=m`: m groups of n ranks. The other parameters are sharded over m x n ranks (`fsdp_size=m*n`), and each
  expert over the m ranks that have it.
- `dp`: replicas of all that (`dp_replicate_size`).
- `tp=t`: t neighbouring ranks share a batch and divide the other parameters. Each sends 1/t of the tokens.
  Whole experts are divided over n x t ranks (`tp_size=t, ep_size=n*t`).
- `pp`: all that in each stage.

The expert of a token depends on values, which are not known here: every rank gets the same number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.answer.hints import Hints, Question, answer
from tb_memplugin.estimate.ranks.mesh import PIPELINE

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

EXPERTS = "ep"
"""The name of the mesh dimension over which experts are divided."""

ORDER = (PIPELINE, "dp", "fsdp", EXPERTS, "tp")
"""The required order of dimensions in a mesh with experts: ranks that communicate most are neighbours."""

ASKS = "transformers/distributed/expert_parallel.py"
"""The file in which transformers reads how many rows it sends to each rank and receives from it."""


@contextmanager
def refusing_old_transformers() -> Iterator[None]:
    """Convert a failed look-up of something that only new versions of transformers have.

    Raises:
        MemPluginError: the installed version does not have it.
    """
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise MemPluginError(
            "This version of transformers cannot divide a model that was built from a config.",
            where="--mesh",
            fix="Use transformers 5.21 or newer, or a function with a parameter named mesh.",
        ) from error


@dataclass(frozen=True, slots=True)
class ExpertMesh:
    """The number of ranks along each dimension; `views` is transformers' mesh of the same ranks."""

    stages: int
    replicas: int
    shards: int
    experts: int
    tensors: int
    views: Any

    @classmethod
    def of(cls, mesh: DeviceMesh) -> ExpertMesh:
        """Create it from a mesh whose dimensions are in `ORDER`.

        Raises:
            MemPluginError: transformers is too old.
        """
        with refusing_old_transformers():
            from transformers.distributed.expert_parallel import apply_expert_parallelism  # noqa: F401
            from transformers.distributed.utils import TransformersDeviceMesh
        sizes = dict(zip(mesh.mesh_dim_names or (), mesh.mesh.shape, strict=True))
        stages, replicas, shards, experts, tensors = (sizes.get(name, 1) for name in ORDER)
        views = _views(mesh.device_type, stages, replicas, shards, experts, tensors)
        return cls(stages, replicas, shards, experts, tensors, TransformersDeviceMesh(*views))

    @property
    def config(self) -> Any:
        """The same division as a transformers `DistributedConfig`, within one stage."""
        from transformers.distributed.configuration_utils import DistributedConfig

        return DistributedConfig(
            dp_replicate_size=self.replicas,
            fsdp_size=self.shards * self.experts,
            tp_size=self.tensors,
            ep_size=self.experts * self.tensors,
        )

    @property
    def dense(self) -> DeviceMesh:
        """The ranks over which the parameters outside experts are sharded."""
        return self._within("fsdp")

    @property
    def copies(self) -> DeviceMesh:
        """The ranks that have the same experts; the experts are sharded over them."""
        return self._within("efsdp")

    def _within(self, name: str) -> DeviceMesh:
        mesh = self.views.get_mesh(("dp_replicate", name) if self.replicas > 1 else name)
        return mesh  # type: ignore[no-any-return]  # mypy does not follow transformers

    @property
    def description(self) -> str:
        """A sentence that describes the division."""
        dense = f"sharded over {self.shards * self.experts} by fully_shard"
        if self.tensors > 1:
            dense = f"divided over {self.tensors} by its plan for tensors and {dense}"
        more = f", in {self.replicas} replicas" if self.replicas > 1 else ""
        return (
            f"Experts are divided over {self.experts * self.tensors} ranks by transformers' plan, all else "
            f"is {dense}{more}."
        )


def by_experts(model: Any, mesh: DeviceMesh) -> str:
    """Divide a whole model's experts and shard the rest; return a sentence on what was done.

    Raises:
        MemPluginError: the model has no plan for it or its experts cannot be divided over these ranks, or
            transformers is too old.
    """
    _refuse_without_plan(model)
    ranks = ExpertMesh.of(mesh)
    try:
        model.maybe_distribute_model(model, ranks.config, ranks.views)
    except ValueError as error:
        raise _cannot_be(error) from error
    return ranks.description


def divided_experts(model: Any, mesh: DeviceMesh) -> tuple[ExpertMesh, tuple[nn.Module, ...]]:
    """Divide a whole model's experts, and with `tp` its tensors too, before a stage is cut out of it.

    Returns:
        The ranks, and the modules that hold experts.

    Raises:
        MemPluginError: for the same reasons as `by_experts`.
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
    """Shard the experts that a stage contains, as transformers does in whole models."""
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
    """Return hints that send the same number of rows to each rank, and a sentence that says so.

    The user's hints come first.

    Args:
        tokens: the number of tokens that a rank sends at once.
        ranks: the number of ranks that exchange tokens.
    """
    each = max(1, round(tokens * getattr(config, "num_experts_per_tok", 1) / ranks))

    def rows(asked: Question) -> Any:
        if (hint := answer(hints, asked)) is not None:
            return hint
        here = asked.kind == "count" and Path(asked.file).as_posix().endswith(ASKS)
        return each if here else None

    return rows, (
        f"Which expert gets a token depends on values. An even distribution is assumed: {each:,} rows "
        "from each rank to each. A rank with more popular experts needs more memory."
    )


def _refuse_without_plan(model: Any) -> None:
    if not getattr(model, "ep_plan", None):
        raise MemPluginError(
            f"{type(model).__name__} has no plan for expert parallelism (base_model_ep_plan in its config).",
            where="--mesh",
            fix="Use fsdp or tp, or a function with a parameter named mesh.",
        )
    if has_tied_parameters(model):
        raise MemPluginError(
            f"{type(model).__name__} has tied parameters: they cannot be sharded beside divided experts.",
            where="--mesh",
            fix="Use fsdp or tp, or a config with tie_word_embeddings=false.",
        )


def has_tied_parameters(model: nn.Module) -> bool:
    """Whether modules share a parameter, such as the embedding and the head."""
    return len(list(model.parameters())) < len(list(model.named_parameters(remove_duplicate=False)))


def _cannot_be(error: ValueError) -> MemPluginError:
    return MemPluginError(
        f"transformers cannot divide the model: {error}", where="--mesh", fix="Choose another ep."
    )


def _views(
    device: str, stages: int, replicas: int, shards: int, experts: int, tensors: int
) -> tuple[DeviceMesh, DeviceMesh]:
    """Return two meshes of the same ranks: one for sharded layers, one for divided experts."""
    from torch.distributed.device_mesh import init_device_mesh

    dense = (stages, replicas, shards * experts, tensors)
    divided = (stages, replicas, shards, experts * tensors)
    return (
        init_device_mesh(device, dense, mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp")),
        init_device_mesh(device, divided, mesh_dim_names=("pp", "dp_replicate", "efsdp", EXPERTS)),
    )
