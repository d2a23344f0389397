"""Tests for FSDP1, `FullyShardedDataParallel`: torch's code on fake tensors, with sizes found by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy

from tb_memplugin import MemoryEstimator, MemPluginError
from tb_memplugin.estimate.ranks import RankEstimate, estimate_ranks
from tests.estimate.ranks.real_ranks import sizes

KIB = 1 << 10
WHOLE, SHARD = 256 * KIB, 32 * KIB
"""Bytes of a layer of 256 x 256 float32, and of an eighth of it."""


def one_of_eight(device: str = "cuda", **options: Any) -> RankEstimate:
    """Estimate rank 0 of 8 for one step of four layers, each wrapped separately."""

    def build(estimator: MemoryEstimator, mesh: DeviceMesh) -> nn.Module:
        with torch.device(estimator.device):
            layers = (FullyShardedDataParallel(nn.Linear(256, 256, bias=False), **options) for _ in range(4))
            model = FullyShardedDataParallel(nn.Sequential(*layers), **options)
            model(torch.ones(2, 256)).sum().backward()
        return model

    return estimate_ranks(build, 8, [0], device=device, gpu="a100").of(0)


def gathered(one: RankEstimate, size: int) -> int:
    """Count how often a layer's parameters are gathered: their storage is resized each time."""
    blocks, operators = one.trace.allocations, one.trace.operators
    names = [operators[row] for row in blocks.operator]
    return sum(
        name == "aten::resize_storage" and bytes_ == size
        for name, bytes_ in zip(names, blocks.bytes, strict=True)
    )


@pytest.mark.parametrize("original", [False, True])
def test_a_rank_holds_an_eighth_and_gathers_for_forward_and_backward(original: bool) -> None:
    one = one_of_eight(use_orig_params=original)
    blocks = one.trace.allocations
    alive = blocks.bytes[(blocks.freed >= len(one.trace.events)) & (blocks.bytes < WHOLE)]
    assert alive.tolist().count(SHARD) == 4 + 4  # parameters and gradients
    assert gathered(one, WHOLE) == 4 + 4


def test_parameters_that_stay_after_forward_are_gathered_once() -> None:
    assert gathered(one_of_eight(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP), WHOLE) == 4


def test_mixed_precision_gathers_halves() -> None:
    one = one_of_eight(mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    assert gathered(one, WHOLE // 2) == 4 + 4
    assert sizes(one, "parameter") == [SHARD] * 4


def test_without_a_gpu_it_is_refused_by_name_as_torch_does() -> None:
    with pytest.raises(MemPluginError, match="FullyShardedDataParallel") as refused:
        one_of_eight("cpu")
    assert "fully_shard" in str(refused.value)
