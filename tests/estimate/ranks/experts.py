"""Programs with experts on other ranks, to run in real processes and on fake tensors."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from tb_memplugin.estimate.answer.workload import Built
from tb_memplugin.estimate.ranks.mesh import parse_mesh
from tb_memplugin.estimate.ranks.pipeline import fed, sharded_stage
from tb_memplugin.estimate.ranks.sharded_model import by_experts

WIDTH = 128
SENT = ((5, 11), (9, 7))
"""The number of rows that each of two ranks sends to each."""


def exchange(functional: bool) -> object:
    """Run one expert on each rank: 16 rows are sent to their experts, computed there, and sent back."""
    rank, world = dist.get_rank(), dist.distributed_c10d._get_default_group()
    expert = nn.Linear(WIDTH, WIDTH, bias=False)
    rows = torch.ones(16, WIDTH, requires_grad=True)
    sent = torch.tensor(SENT[rank])
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    inward, outward = received.tolist(), list(SENT[rank])  # hints answer for this line
    if functional:
        here = all_to_all_single_autograd(2 * rows, inward, outward, world)
        all_to_all_single_autograd(expert(here), outward, inward, world).sum().backward()
        return expert, rows
    here, back = torch.empty(sum(inward), WIDTH), torch.empty(16, WIDTH)
    dist.all_to_all_single(here, rows.detach(), inward, outward)
    dist.all_to_all_single(back, expert(here).detach(), outward, inward)
    return expert, rows, back


def train_a_mixture(folder: str | None = None, ranks: str = "ep=2") -> object:
    """Train a Mixtral with four experts for two steps on a mesh.

    With a folder, as in a real run, the numbers of rows that it reads are written there.
    """
    read: list[int] = []
    if folder is not None:
        _note(read)
    kept = (_in_stages if "pp" in ranks else _whole)(_mixture(), ranks)
    if folder is not None:
        Path(folder, f"read{dist.get_rank()}.json").write_text(json.dumps(read))
    return kept


def _whole(model: Any, ranks: str) -> object:
    by_experts(model, _mesh(ranks))
    ids = _tokens(1)
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()
    return model


def _in_stages(model: Any, ranks: str) -> object:
    """Run 1F1B with two micro-batches, divided as by the command; stages are given their shapes."""
    mesh, ids = _mesh(ranks), _tokens(2)
    given = fed(Built(model, (), {"input_ids": ids, "labels": ids}), 2)
    group, index = mesh["pp"].get_group(), mesh["pp"].get_local_rank()
    module = sharded_stage(model, index, 2, mesh)[0]
    del model
    gc.collect()  # frees the other stage's part
    between = torch.empty(1, 32, 64, requires_grad=True)
    ends: dict[str, Any] = {
        "input_args": between if index else given.inputs[0][:1],
        "output_args": torch.empty(1, 32, 128, requires_grad=True) if index else between,
    }
    stage = PipelineStage(module, index, 2, torch.empty(0).device, group=group, **ends)
    schedule = Schedule1F1B(stage, 2, loss_fn=given.loss)
    for _ in range(2):
        schedule.step(*given.inputs[: index == 0], target=given.target if index else None)
        module.zero_grad()
    return schedule


def _mixture() -> Any:
    import transformers

    torch.manual_seed(dist.get_rank())
    config = transformers.MixtralConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        use_cache=False,
        attn_implementation="eager",
        experts_implementation="batched_mm",
    )
    return transformers.MixtralForCausalLM(config)


def _mesh(ranks: str) -> DeviceMesh:
    told = parse_mesh(ranks)
    return init_device_mesh("cpu", told.shape, mesh_dim_names=told.names)


def _tokens(samples: int) -> torch.Tensor:
    return torch.randint(0, 128, (samples, 32))


def _note(read: list[int]) -> None:
    original = torch.Tensor.tolist

    def tolist(tensor: torch.Tensor) -> object:
        values = original(tensor)
        if tensor.dim() == 2:
            read.extend(number for row in values for number in row)
        return values

    torch.Tensor.tolist = tolist  # type: ignore[assignment,method-assign]  # until the process ends
