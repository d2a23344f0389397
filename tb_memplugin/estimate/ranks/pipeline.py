"""Run one rank of a pipeline: build its stages of a target, and run torch's own schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

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
    optimizer_of,
    refuse_what_it_does_not_take,
)
from tb_memplugin.estimate.ranks.expert_parallel import EXPERTS, divided_experts, shard_experts
from tb_memplugin.estimate.ranks.mesh import PIPELINE
from tb_memplugin.estimate.ranks.sharded_model import (
    NOTE,
    by_tensors,
    fully_sharded,
    in_data_parallel,
    refuse_other_dimensions,
)
from tb_memplugin.estimate.ranks.stages import Fed, Stage, fed, stage_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from tb_memplugin.estimate.answer.estimator import MemoryEstimator

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
) -> tuple[list[Stage], Fed, tuple[str, ...]]:
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


def sharded_stage(model: nn.Module, index: int, count: int, mesh: DeviceMesh) -> tuple[Stage, str]:
    """Return a rank's part of a stage of a whole model, and a sentence on how it was sharded, "" if not."""
    names = mesh.mesh_dim_names or ()
    if EXPERTS in names:
        ranks, experts = divided_experts(model, mesh)
        stage = stage_of(model, index, count)
        shard_experts(stage.module, experts, ranks)
        fully_sharded(stage.module, ranks.dense)
        return stage, f"{NOTE}In each stage: {ranks.description}"
    ways = [by_tensors(model, mesh)] if "tp" in names else []
    stage = stage_of(model, index, count)
    module, more = in_data_parallel(stage.module, mesh)
    sharding = ", ".join([*ways, *more])
    return replace(stage, module=module), f"{NOTE}Each stage is sharded by {sharding}." if sharding else ""


def _train(
    stages: Sequence[Stage],
    feed: Fed,
    workload: Workload,
    estimator: MemoryEstimator,
    group: DeviceMesh,
    how: Pipelining,
) -> str | None:
    modules = nn.ModuleList(stage.module for stage in stages)
    name, optimizer = optimizer_of(Built(modules), workload)
    estimator.watch(modules, optimizer)
    schedule = _schedule(stages, feed, estimator, group, how)
    first, last = group.get_local_rank() == 0, group.get_local_rank() == group.size() - 1
    for _ in range(STEPS):
        with estimator.track_phase("forward and backward"), autocast_of(workload):
            schedule.step(
                *(feed.inputs if first else ()),
                target=feed.target if last else None,
                return_outputs=False,
            )
        with estimator.track_phase("optimizer"):
            optimizer.step()
            optimizer.zero_grad()
        estimator.step()
    return name


def _schedule(
    stages: Sequence[Stage], feed: Fed, estimator: MemoryEstimator, group: DeviceMesh, how: Pipelining
) -> Any:
    from torch.distributed import pipelining

    kind, each = SCHEDULES[how.schedule]
    pipeline_stages = [
        pipelining.PipelineStage(
            stage.module,
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
