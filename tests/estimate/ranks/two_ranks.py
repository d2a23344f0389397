"""Small training programs for two ranks, to run in two real processes over gloo and on fake tensors."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

STEPS = 3
HALF = "DDP in half precision"

KINDS = (
    "FSDP2",
    "DDP",
    "DDP with views",
    "DDP with unused parameters",
    "DDP with a static graph",
    "DDP with views of a static graph",
    HALF,
)


def model() -> nn.Module:
    """Return a model whose last layer has seven rows: two ranks hold four and three of them."""
    return nn.Sequential(
        nn.Linear(256, 1024, bias=False), nn.ReLU(), nn.Linear(1024, 300), nn.ReLU(), nn.Linear(300, 7)
    )


class WithUnused(nn.Module):
    """A module with a layer that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(7, 256), nn.Linear(256, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Call one of the two layers."""
        return self.used(x)


def prepared(kind: str) -> nn.Module:
    whole: Any = model()
    if kind == "FSDP2":
        mesh = init_device_mesh("cpu", (2,))
        for index in (0, 2, 4):
            fully_shard(whole[index], mesh=mesh)
        fully_shard(whole, mesh=mesh)
        return whole
    options: dict[str, dict[str, Any]] = {
        "DDP with views": {"gradient_as_bucket_view": True},
        "DDP with unused parameters": {"find_unused_parameters": True},
        "DDP with a static graph": {"static_graph": True},
        "DDP with views of a static graph": {"static_graph": True, "gradient_as_bucket_view": True},
    }
    if kind == "DDP with unused parameters":
        whole.append(WithUnused())
    wrapped = DistributedDataParallel(whole, bucket_cap_mb=1, **options.get(kind, {}))
    if kind == HALF:
        wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return wrapped


def train(kind: str, pause: float = 0.0) -> nn.Module:
    """Train for a few steps; `pause` seconds after each backward let gloo's threads free what they sent."""
    wrapped, batch = prepared(kind), torch.ones(32, 256)
    optimizer = torch.optim.Adam(wrapped.parameters(), foreach=False)
    for _ in range(STEPS):
        wrapped(batch).square().sum().backward()
        time.sleep(pause)
        optimizer.step()
        optimizer.zero_grad()
    return wrapped
