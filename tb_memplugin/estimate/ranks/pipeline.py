"""Run one rank of a pipeline: divide a target into stages, and run torch's own schedule.

An `nn.Sequential` can be divided, and a model of transformers whose config has a `base_model_pp_plan` with an
embedding, equal layers and a norm. The first stage has the embedding, the last one the norm and the head; a
tied head is a copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from tb_memplugin.analysis.units import counted
from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.answer.workload import (
    STEPS,
    Built,
    Ran,
    Target,
    Workload,
    autocast_of,
    checkpoint_model,
    default_dtype,
    errors_as_refusals,
    loss_of,
    optimizer_of,
    refuse_what_it_does_not_take,
)
from tb_memplugin.estimate.ranks.mesh import PIPELINE
from tb_memplugin.estimate.ranks.sharded_model import (
    EXPERTS,
    NOTE,
    by_tensors,
    divided_experts,
    fully_sharded,
    in_data_parallel,
    refuse_other_dimensions,
    shard_experts,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from tb_memplugin.estimate.answer.estimator import MemoryEstimator

PARTS_OF_A_DECODER = {"embed_tokens", "layers", "norm"}
"""The module names that a config's `base_model_pp_plan` must have."""

Loss = Callable[[Any, torch.Tensor], torch.Tensor]
"""`loss(output, target)` returns the loss of a micro-batch."""


@dataclass(frozen=True, slots=True)
class Fed:
    """The inputs of a whole step for the first stage, and the target and loss for the last stage."""

    inputs: tuple[torch.Tensor, ...]
    target: torch.Tensor
    loss: Loss


def shares(layers: int, parts: int) -> list[range]:
    """Return the layers of each part, in order: as equal as possible, the larger parts first.

    Raises:
        MemPluginError: there are fewer layers than parts.
    """
    if layers < parts:
        raise MemPluginError(
            f"The model has {layers} layers, which is too few for {parts} stages.",
            where="--mesh",
            fix="Use fewer stages.",
        )
    return [range(part[0], part[-1] + 1) for part in np.array_split(range(layers), parts)]


def stage_of(model: nn.Module, index: int, count: int) -> nn.Module:
    """Return one stage of a model. The parts of other stages are removed from the model.

    Raises:
        MemPluginError: the model cannot be divided, or not into that many stages.
    """
    if isinstance(model, nn.Sequential):
        own = shares(len(model), count)[index]
        return model[own.start : own.stop]
    base = getattr(model, getattr(model, "base_model_prefix", ""), None)
    plan = getattr(getattr(model, "config", None), "base_model_pp_plan", None) or {}
    if base is None or base is model or set(plan) != PARTS_OF_A_DECODER:
        raise MemPluginError(
            f"{type(model).__name__} cannot be divided into stages.",
            where="--mesh",
            fix=(
                "The model must be a torch.nn.Sequential, or a transformers model whose config has a "
                "base_model_pp_plan. Otherwise build the stages in Python: docs/estimate_ranks.md, "
                "Pipelines."
            ),
        )
    return _decoder_stage(model, base, index, count)


def fed(built: Built, micro_batches: int) -> Fed:
    """Return the inputs, target and loss of a pipeline for a step.

    Raises:
        MemPluginError: forward takes something other than tensors, or more than two keyword arguments.
    """
    labels = built.keywords.get("labels")
    inputs = (*built.arguments, *(value for name, value in built.keywords.items() if name != "labels"))
    if not all(isinstance(value, torch.Tensor) for value in inputs) or len(built.keywords) > 2:
        raise MemPluginError(
            "The first stage of a pipeline takes only tensors.",
            where="--mesh",
            fix="Return the inputs as a tensor or a tuple of tensors, with samples in the first dimension.",
        )
    if labels is None:
        target = torch.empty(micro_batches, device="cpu")
        return Fed(inputs, target, lambda output, _: loss_of(output))
    model: Any = built.model
    function, words = model.loss_function, model.config.vocab_size
    return Fed(
        inputs, labels, lambda logits, target: function(logits=logits, labels=target, vocab_size=words)
    )


class DecoderStage(nn.Module):
    """Some layers of a decoder. They turn token ids or hidden states into hidden states or logits."""

    def __init__(self, model: nn.Module, first: bool, last: bool) -> None:
        super().__init__()
        self.model = model
        self._takes = "input_ids" if first else "inputs_embeds"
        self._gives = "logits" if last else "last_hidden_state"

    def forward(self, micro_batch: torch.Tensor) -> Any:
        """Run one micro-batch."""
        return getattr(self.model(**{self._takes: micro_batch}), self._gives)


def _decoder_stage(model: Any, base: Any, index: int, count: int) -> nn.Module:
    own, first, last = shares(len(base.layers), count)[index], index == 0, index == count - 1
    # A layer looks its type up by its index among the layers of this stage.
    base.config = copy.deepcopy(base.config)
    base.config.num_hidden_layers = len(own)
    if getattr(base.config, "layer_types", None):
        base.config.layer_types = list(base.config.layer_types)[own.start : own.stop]
    base.layers = base.layers[own.start : own.stop]
    if not first:
        base.embed_tokens = None
    if not last:
        base.norm = nn.Identity()
    return DecoderStage(model if last else base, first, last)


SCHEDULES = {
    "1f1b": ("Schedule1F1B", 1),
    "gpipe": ("ScheduleGPipe", 1),
    "interleaved": ("ScheduleInterleaved1F1B", 2),
}
"""Schedules by name: the class in torch.distributed.pipelining, and the number of stages on each rank."""


@dataclass(frozen=True, slots=True)
class Pipelining:
    """How a pipeline runs. `micro_batches` is their number in a step; None for the number of stages."""

    schedule: str = "1f1b"
    micro_batches: int | None = None

    def micro_batches_on(self, ranks: int) -> int:
        """Return the number of micro-batches in a step; the batch is a multiple of it."""
        return self.micro_batches or SCHEDULES[self.schedule][1] * ranks


def run_stage(
    target: Target, workload: Workload, estimator: MemoryEstimator, mesh: DeviceMesh, how: Pipelining
) -> Ran:
    """Build this rank's stages inside an entered estimator, and run training steps.

    Raises:
        MemPluginError: the target cannot be divided, has no parameter for a given size, or does not run.
    """
    refuse_what_it_does_not_take(target, workload)
    names = mesh.mesh_dim_names or ()
    refuse_other_dimensions(names if EXPERTS in names else tuple(name for name in names if name != PIPELINE))
    _, each = SCHEDULES[how.schedule]
    group = mesh[PIPELINE]
    micro_batches = how.micro_batches_on(group.size())
    workload = _settled(target, workload, micro_batches)
    with errors_as_refusals(target.name, "built"), torch.device("cuda"), default_dtype(workload.torch_dtype):
        stages, feed, stage_notes = _stages(target, workload, mesh, each, micro_batches)
        estimator.forget_what_is_gone()
    with errors_as_refusals(target.name, "run"):
        name = _train(stages, feed, workload, estimator, group, replace(how, micro_batches=micro_batches))
    notes = _notes(target, workload, how, group.size(), each, micro_batches)
    return Ran(replace(workload, optimizer=name), (*notes, *stage_notes))


def _settled(target: Target, workload: Workload, micro_batches: int) -> Workload:
    if workload.inference or workload.autocast == "fp16":
        feature = "inference" if workload.inference else "a GradScaler"
        raise MemPluginError(
            f"A pipeline with {feature} cannot be estimated.",
            where="--mesh",
            fix="Estimate training steps in bf16 or fp32, or run your own schedule with estimate_ranks.",
        )
    if workload.batch is None:
        workload = replace(workload, batch=micro_batches if "batch" in target.takes else None)
    workload = target.settled(workload)
    if workload.batch is not None and workload.batch % micro_batches:
        raise MemPluginError(
            f"{workload.batch} samples cannot be divided into {micro_batches} micro-batches.",
            where="--batch",
            fix=f"Use a multiple, such as --batch {micro_batches}, or another --micro-batches.",
        )
    return workload


def _stages(
    target: Target, workload: Workload, mesh: DeviceMesh, each: int, micro_batches: int
) -> tuple[list[nn.Module], Fed, tuple[str, ...]]:
    """Build each stage of this rank: a whole model is built for it, and its other parts are freed at once."""
    group = mesh[PIPELINE]
    stages, feeds, count = [], [], each * group.size()
    note = ""
    for turn in range(each):
        built = target.build(workload, None)
        built.model.train()
        feeds.append(fed(built, micro_batches))
        if workload.checkpointing:
            checkpoint_model(built.model)
        _refuse_an_optimizer(built)
        stage, note = sharded_stage(built.model, group.get_local_rank() + turn * group.size(), count, mesh)
        stages.append(stage)
    return stages, feeds[-1], (note,) * bool(note)


def sharded_stage(model: nn.Module, index: int, count: int, mesh: DeviceMesh) -> tuple[nn.Module, str]:
    """Return a rank's part of a stage of a whole model, and a sentence on how it was sharded, "" if not."""
    names = mesh.mesh_dim_names or ()
    if EXPERTS in names:
        ranks, experts = divided_experts(model, mesh)
        stage = stage_of(model, index, count)
        shard_experts(stage, experts, ranks)
        fully_sharded(stage, ranks.dense)
        return stage, f"{NOTE}In each stage: {ranks.description}"
    ways = [by_tensors(model, mesh)] if "tp" in names else []
    stage, more = in_data_parallel(stage_of(model, index, count), mesh)
    sharding = ", ".join([*ways, *more])
    return stage, f"{NOTE}Each stage is sharded by {sharding}." if sharding else ""


def _train(
    stages: Sequence[nn.Module],
    feed: Fed,
    workload: Workload,
    estimator: MemoryEstimator,
    group: DeviceMesh,
    how: Pipelining,
) -> str | None:
    modules = nn.ModuleList(stages)
    name, optimizer = optimizer_of(Built(modules), workload)
    estimator.watch(modules, optimizer)
    schedule = _schedule(stages, feed, estimator, group, how)
    first, last = group.get_local_rank() == 0, group.get_local_rank() == group.size() - 1
    for _ in range(STEPS):
        with estimator.track_phase("forward and backward"), autocast_of(workload):
            schedule.step(
                *(feed.inputs if first else ()), target=feed.target if last else None, return_outputs=False
            )
        with estimator.track_phase("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
        estimator.step()
    return name


def _schedule(
    stages: Sequence[nn.Module], feed: Fed, estimator: MemoryEstimator, group: DeviceMesh, how: Pipelining
) -> Any:
    from torch.distributed import pipelining

    kind, each = SCHEDULES[how.schedule]
    pipeline_stages = [
        pipelining.PipelineStage(
            stage,
            group.get_local_rank() + turn * group.size(),
            each * group.size(),
            estimator.device,
            group=group.get_group(),
        )
        for turn, stage in enumerate(stages)
    ]
    schedule: Any = getattr(pipelining, kind)
    return schedule(pipeline_stages if each > 1 else pipeline_stages[0], how.micro_batches, loss_fn=feed.loss)


def _refuse_an_optimizer(built: Built) -> None:
    if built.optimizer is not None:
        raise MemPluginError(
            f"The target returns an optimizer of the whole model, {type(built.optimizer).__name__}.",
            where="--mesh",
            fix="Return only (model, inputs): each stage gets its own optimizer, chosen with --optimizer.",
        )


def _notes(
    target: Target, workload: Workload, how: Pipelining, ranks: int, each: int, micro_batches: int
) -> tuple[str, ...]:
    size = f" of {counted(workload.batch // micro_batches, 'sample')}" if workload.batch else ""
    stages = f"{each} stages on each of {ranks} ranks" if each > 1 else f"{ranks} stages"
    return (
        f"Pipeline: {target.name} in {stages}, layers divided evenly, the first stage with the embedding and "
        f"the last with the head; {SCHEDULES[how.schedule][0]} of torch.distributed.pipelining, "
        f"{micro_batches} micro-batches{size}.",
    )
