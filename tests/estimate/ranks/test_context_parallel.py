"""Tests for context parallelism: torch's own ring attention on fake GPU tensors, with sizes found by hand.

torch does not support it on the CPU, so there is no real run to compare with.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional  # torch replaces the function in this module

from tb_memplugin import MemoryEstimator
from tb_memplugin.estimate.ranks import estimate_ranks

TOKENS, HEADS, WIDTH, RANKS = 256, 4, 64, 4
LOCAL = TOKENS // RANKS * WIDTH * 2
"""Bytes of one rank's tokens in bfloat16: 8 KiB."""


def attend(estimator: MemoryEstimator, mesh: DeviceMesh) -> nn.Module:
    """Run one layer of attention on a sequence that is divided over the ranks."""
    with torch.device(estimator.device):
        layer = nn.Linear(WIDTH, 3 * WIDTH, bias=False, dtype=torch.bfloat16)
        tokens = torch.ones(1, TOKENS, WIDTH, dtype=torch.bfloat16)
        with context_parallel(mesh, buffers=[tokens], buffer_seq_dims=[1]):
            assert tokens.shape[1] == TOKENS // RANKS
            query, key, value = layer(tokens).view(1, -1, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
            functional.scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()
        assert tokens.shape[1] == TOKENS
    return layer


@pytest.mark.parametrize("gpu", ["a100", "h100"])
def test_a_rank_has_its_tokens_and_gathers_the_keys_and_values_of_all(gpu: str) -> None:
    found = estimate_ranks(attend, f"cp={RANKS}", gpu=gpu)
    assert [one.rank for one in found.ranks] == [0, RANKS - 1]
    for one in found.ranks:
        blocks, operators = one.trace.allocations, one.trace.operators
        made = [(operators[blocks.operator[row]], int(blocks.bytes[row])) for row in range(len(blocks))]
        gathers = [size for name, size in made if name == "_c10d_functional::all_gather_into_tensor"]
        assert gathers == [2 * RANKS * LOCAL] * 2  # forward and backward
        assert ("aten::mm", 3 * LOCAL) in made  # queries, keys and values of its own tokens
