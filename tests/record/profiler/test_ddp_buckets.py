"""The sizes of DistributedDataParallel's buckets, as torch tells them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.nn.parallel import DistributedDataParallel

from tb_memplugin.record.alive_before import bucket_sizes
from tb_memplugin.record.modules import ModuleNames


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group_of_one")
def test_the_buckets_are_those_of_before_and_after_they_were_made_again():
    """Weights of 300 and 6 floats: one bucket at first, then one each, since 24 bytes fill one."""
    layers = nn.Sequential(nn.Linear(100, 3, bias=False), nn.Linear(3, 2, bias=False))
    model = nn.ModuleDict({"ddp": DistributedDataParallel(layers, bucket_cap_mb=24 / 2**20)})
    names = ModuleNames.of({"": model})
    row = names.row_of[id(model["ddp"])]
    assert bucket_sizes({"": model}, names) == [(row, 1224)]
    for _ in range(4):
        model["ddp"](torch.ones(5, 100)).sum().backward()
    assert bucket_sizes({"": model}, names) == [(row, 1224), (row, 24), (row, 1200)]


def test_a_model_without_ddp_has_none():
    model = nn.Linear(2, 2)
    assert bucket_sizes({"": model}, ModuleNames.of({"": model})) == []
