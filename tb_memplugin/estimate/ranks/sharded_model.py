"""Divide a model, or a pipeline stage, for one rank of a mesh, as users commonly do.

| dimension | what is done |
|---|---|
| dp | the model in `DistributedDataParallel`; with fsdp, replicas of the sharded model (HSDP) |
| fsdp | `fully_shard` around every repeated layer, and around the model |
| tp | transformers' own plan for the model (`base_model_tp_plan`) |
| ep; also with the others | transformers' own plan for experts |

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

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.answer.hints import Hints, Question, answer
from tb_memplugin.estimate.answer.workload import OWN_CHECKPOINTING, repeated_blocks
from tb_memplugin.estimate.ranks.mesh import PIPELINE

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

DIMENSIONS = ("dp", "fsdp", "tp")
NOTE = "The batch is per rank; ranks that share tensors (tp) or stages (pp) share one batch. "

EXPERTS = "ep"
"""The name of the mesh dimension over which experts are divided."""

ORDER = (PIPELINE, "dp", "fsdp", EXPERTS, "tp")
"""The required order of dimensions in a mesh with experts: ranks that communicate most are neighbours."""

ASKS = "transformers/distributed/expert_parallel.py"
"""The file in which transformers reads how many rows it sends to each rank and receives from it."""


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
    """The number of ranks along each dimension of a stage; `views` is transformers' mesh of the same ranks.

    It has two meshes: one for sharded layers, one for divided experts.
    """

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
        from torch.distributed.device_mesh import init_device_mesh

        sizes = dict(zip(mesh.mesh_dim_names or (), mesh.mesh.shape, strict=True))
        stages, replicas, shards, experts, tensors = (sizes.get(name, 1) for name in ORDER)
        dense = (stages, replicas, shards * experts, tensors)
        divided = (stages, replicas, shards, experts * tensors)
        device = mesh.device_type
        views = TransformersDeviceMesh(
            init_device_mesh(device, dense, mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp")),
            init_device_mesh(device, divided, mesh_dim_names=("pp", "dp_replicate", "efsdp", EXPERTS)),
        )
        return cls(replicas, shards, experts, tensors, views)

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
