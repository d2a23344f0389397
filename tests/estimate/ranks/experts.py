"""Experts on other ranks: the same program in real processes and on fake tensors."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh

from tb_memplugin.estimate.ranks.expert_parallel import by_experts

WIDTH = 128
SENT = ((5, 11), (9, 7))
"""Rows that each of two ranks sends to each."""


def exchange(functional: bool) -> object:
    """One expert a rank: 16 rows are sent, computed where their expert is, and come back."""
    rank, world = dist.get_rank(), dist.distributed_c10d._get_default_group()
    expert = nn.Linear(WIDTH, WIDTH, bias=False)
    rows = torch.ones(16, WIDTH, requires_grad=True)
    sent = torch.tensor(SENT[rank])
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    inward, outward = received.tolist(), list(SENT[rank])  # the line that hints are for
    if functional:
        here = all_to_all_single_autograd(2 * rows, inward, outward, world)
        all_to_all_single_autograd(expert(here), outward, inward, world).sum().backward()
        return expert, rows
    here, back = torch.empty(sum(inward), WIDTH), torch.empty(16, WIDTH)
    dist.all_to_all_single(here, rows.detach(), inward, outward)
    dist.all_to_all_single(back, expert(here).detach(), outward, inward)
    return expert, rows, back


def train_a_mixture(folder: str | None = None, around: str | None = None) -> object:
    """Two steps of a Mixtral with four experts on two ranks; a real run notes the rows that it reads.

    With `around`, dp or fsdp, there are two such pairs.
    """
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
    model = transformers.MixtralForCausalLM(config)
    names, shape = (("ep",), (2,)) if around is None else ((around, "ep"), (2, 2))
    by_experts(model, init_device_mesh("cpu", shape, mesh_dim_names=names))
    ids = torch.randint(0, 128, (1, 32))
    read: list[int] = []
    if folder is not None:
        _note(read)
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()
    if folder is not None:
        Path(folder, f"read{dist.get_rank()}.json").write_text(json.dumps(read))
    return model


def _note(read: list[int]) -> None:
    original = torch.Tensor.tolist

    def tolist(tensor: torch.Tensor) -> object:
        values = original(tensor)
        if tensor.dim() == 2:
            read.extend(number for row in values for number in row)
        return values

    torch.Tensor.tolist = tolist  # type: ignore[assignment,method-assign]  # the process ends with the program
