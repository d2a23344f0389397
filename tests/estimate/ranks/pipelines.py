"""Small pipelines of torch.distributed.pipelining, to run in real processes and on fake tensors."""

from __future__ import annotations

import gc
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from tb_memplugin.estimate.answer.workload import Built
from tb_memplugin.estimate.ranks.pipeline import fed, stage_of
from tb_memplugin.estimate.ranks.sharded_model import by_tensors, in_data_parallel

ROWS, WIDTH, INSIDE, MICRO_BATCHES, STEPS = 4, 256, 320, 6, 2

LOOPED: dict[str, Any] = {
    "interleaved": ScheduleInterleaved1F1B,
    "zero bubble": ScheduleInterleavedZeroBubble,
}
"""Schedules with two stages on each rank: rank r of n has stages r and r + n."""

FOLDED: dict[str, Any] = {"zero bubble V": ScheduleZBVZeroBubble, "dual pipe V": ScheduleDualPipeV}
"""Schedules whose stages go through the ranks and back again: rank 0 has the first and the last stage."""


def total(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the loss."""
    return (output - target).square().sum()


class Layer(nn.Module):
    """Saves the result of its sigmoid, INSIDE floats for each row; its input and output are the stage's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, INSIDE, bias=False), nn.Linear(INSIDE, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run one micro-batch."""
        return self.second(self.first(x).sigmoid())


def stage(index: int, stages: int, told: bool) -> PipelineStage:
    """Return a stage of one layer; with `told` it is given the shapes of its input and output."""
    example = torch.empty(ROWS, WIDTH, requires_grad=True) if told else None
    device = torch.empty(0).device
    return PipelineStage(Layer(), index, stages, device, input_args=example, output_args=example)


def schedule(kind: str, micro_batches: int, told: bool) -> Any:
    """Return this process's part of a pipeline; `LOOPED` and `FOLDED` schedules have two stages on a rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if kind in LOOPED or kind in FOLDED:
        second = rank + world if kind in LOOPED else 2 * world - 1 - rank
        both: list[Any] = [stage(index, 2 * world, told) for index in (rank, second)]
        return (LOOPED | FOLDED)[kind](both, micro_batches, loss_fn=total)
    made = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe}[kind]
    return made(stage(rank, world, told), micro_batches, loss_fn=total)


def train(kind: str, micro_batches: int = MICRO_BATCHES, *, told: bool = False) -> object:
    """Train for a few steps as this process's rank."""
    rank = dist.get_rank()
    made = schedule(kind, micro_batches, told)
    stages = made._stages if hasattr(made, "_stages") else [made._stage]
    weights = [weight for one in stages for weight in one.submod.parameters()]
    optimizer = torch.optim.SGD(weights, 0.1, momentum=0.9, foreach=False)
    batch = torch.ones(micro_batches * ROWS, WIDTH)
    for _ in range(STEPS):
        made.step(*[batch][: rank == 0], target=batch if any(one.is_last for one in stages) else None)
        optimizer.step()
        optimizer.zero_grad()
    return made, optimizer


def train_a_decoder(tensors: int = 1) -> object:
    """Train a Llama of three layers, divided as by the command, with `tensors` ranks for each stage."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        use_cache=False,
        attn_implementation="eager",  # the CPU's fused kernel allocates buffers
    )
    ids = torch.zeros(4, 32, dtype=torch.long)
    model = transformers.LlamaForCausalLM(config)
    given = fed(Built(model, (), {"input_ids": ids, "labels": ids}), 4)
    world = dist.get_world_size() // tensors
    mesh = init_device_mesh("cpu", (world, tensors), mesh_dim_names=("pp", "tp"))
    if tensors > 1:
        by_tensors(model, mesh)
    rank = mesh["pp"].get_local_rank()
    module = stage_of(model, rank, world)
    del model
    gc.collect()  # frees the other stages' parts
    stage = PipelineStage(module, rank, world, torch.empty(0).device, group=mesh["pp"].get_group())
    made = Schedule1F1B(stage, 4, loss_fn=given.loss, scale_grads=False)
    optimizer = torch.optim.AdamW(module.parameters(), foreach=False)
    for _ in range(STEPS):
        made.step(*given.inputs[: rank == 0], target=given.target if rank == world - 1 else None)
        optimizer.step()
        optimizer.zero_grad()
    return made, optimizer


def train_replicas(sharding: str, kind: str, *, told: bool = False) -> object:
    """Train for a few steps as one of four ranks: two replicas of two ranks with one or two stages each.

    Args:
        sharding: "dp" or "fsdp", applied to a stage of two layers as by the command.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", sharding))
    stages, rank, each = mesh["pp"], mesh["pp"].get_local_rank(), 2 if kind in LOOPED else 1
    example = torch.empty(ROWS, WIDTH, requires_grad=True) if told else None
    made: list[Any] = []
    for index in range(rank, 2 * each, 2):
        module, _ = in_data_parallel(nn.Sequential(Layer(), Layer()), mesh)
        options: dict[str, Any] = {"input_args": example, "output_args": example, "group": stages.get_group()}
        made.append(PipelineStage(module, index, 2 * each, torch.empty(0).device, **options))
    ways: dict[str, Any] = {"1F1B": Schedule1F1B, "GPipe": ScheduleGPipe} | LOOPED
    ran = ways[kind](made if each > 1 else made[0], MICRO_BATCHES, loss_fn=total)
    weights = [weight for one in made for weight in one.submod.parameters()]
    optimizer = torch.optim.SGD(weights, 0.1, momentum=0.9, foreach=False)
    batch = torch.ones(MICRO_BATCHES * ROWS, WIDTH)
    for _ in range(STEPS):
        ran.step(*[batch][: rank == 0], target=batch if rank == 1 else None)
        optimizer.step()
        optimizer.zero_grad()
    return ran, optimizer
