"""Tests that an estimate matches a recording that was taken on a GPU.

The recording is snapshot 20: attention written by hand with three inputs of 2 MiB, from the process's first
allocation on. The program below was written from the recorded C++ frames, operators and sizes; the estimator
does not read the recording.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch

from tb_memplugin import MemoryEstimator, load
from tb_memplugin.analysis.moments import peak
from tb_memplugin.trace import Kind, MemoryTrace
from tests.commands.files import real, stranger

pytestmark = real


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key) / math.sqrt(query.shape[-1])
    highest = scores.max(dim=-1, keepdim=True)[0]
    powers = torch.exp(scores - highest)
    weights = powers / powers.sum(dim=-1, keepdim=True)
    return torch.einsum("bhqk,bhkd->bhqd", weights, value)


@cache
def estimated() -> MemoryEstimator:
    with MemoryEstimator(gpu="a100") as estimator:
        inputs = [torch.randn(1, 8, 4096, 16, device="cuda", requires_grad=True) for _ in range(3)]
        result = attention(*inputs)
        loss = result.sum()
        loss.backward()
    return estimator


@pytest.fixture(scope="module")
def recorded() -> MemoryTrace:
    return load(stranger("snapshots/20_*"))


def test_the_peak_is_the_recorded_one_to_the_byte(recorded: MemoryTrace) -> None:
    ours = estimated().trace_result()
    assert peak(ours, device="cuda:0").bytes == peak(recorded, device="cuda:0").bytes == 3_249_143_816


def test_the_reserve_is_the_recorded_one_to_the_byte(recorded: MemoryTrace) -> None:
    assert estimated().estimate().peak_reserved_bytes == int(recorded.events.reserved.max()) == 3_781_165_056


def test_every_allocation_is_the_recorded_one_in_order(recorded: MemoryTrace) -> None:
    theirs, ours = recorded.events, estimated().trace_result().events
    assert np.array_equal(ours.bytes[ours.kind == Kind.ALLOC], theirs.bytes[theirs.kind == Kind.ALLOC])
