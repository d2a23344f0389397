"""Estimates of ranks beside real ranks over NCCL: every allocation in order, and peaks. Needs two GPUs."""

from __future__ import annotations

import gc
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from tb_memplugin.estimate.ranks import RankEstimate, estimate_ranks
from tb_memplugin.trace import Kind

RANKS = 2
PAUSE = 0.3
"""Seconds after which NCCL's thread has noticed that collectives are complete (it looks every 0.1)."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < RANKS, reason="fewer than two CUDA devices, or not run with -m gpu"
    ),
]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(256), nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the layer's result to its input."""
        result: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return result


def layers() -> nn.Sequential:
    with torch.device("cuda"):
        return nn.Sequential(*(Layer() for _ in range(4)))


def replicated(mesh: DeviceMesh, **options: Any) -> nn.Module:
    return DistributedDataParallel(layers(), bucket_cap_mb=2, process_group=mesh.get_group(), **options)


def compressed(mesh: DeviceMesh) -> nn.Module:
    model = replicated(mesh)
    model.register_comm_hook(None, bf16_compress_hook)  # type: ignore[operator]
    return model


def sharded(mesh: DeviceMesh, **options: Any) -> nn.Module:
    model = layers()
    for layer in model:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    return model


def in_bf16(mesh: DeviceMesh) -> nn.Module:
    return sharded(mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


def divided(mesh: DeviceMesh) -> nn.Module:
    model = layers()
    for layer in model:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(layer, mesh, plan)
    return model


PROGRAMS: dict[str, Callable[[DeviceMesh], nn.Module]] = {
    "DDP": replicated,
    "DDP with views": lambda mesh: replicated(mesh, gradient_as_bucket_view=True),
    "DDP with unused parameters": lambda mesh: replicated(mesh, find_unused_parameters=True),
    "DDP with a static graph": lambda mesh: replicated(mesh, static_graph=True),
    "DDP in bfloat16": compressed,
    "FSDP2": sharded,
    "FSDP2 without resharding": lambda mesh: sharded(mesh, reshard_after_forward=False),
    "FSDP2 in bfloat16": in_bf16,
    "tensors": divided,
}


def train(program: Callable[[DeviceMesh], nn.Module], mesh: DeviceMesh) -> object:
    """Train for three steps."""
    model, batch = program(mesh), torch.empty(8, 32, 256, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(3):
        model(batch).square().sum().backward()
        time.sleep(PAUSE)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def in_process(rank: int, folder: str, port: int) -> None:
    """Run all programs as one rank, and write what the allocator did."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=RANKS)
    found = {name: measured(program) for name, program in PROGRAMS.items()}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def measured(program: Callable[[DeviceMesh], nn.Module]) -> dict[str, Any]:
    """Return the sizes of a training's allocations in order, and its peaks."""
    dist.all_reduce(torch.zeros(1, device="cuda"))  # lets go what the last program's collectives kept
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    stats = torch.cuda.memory_stats()
    torch.cuda.memory._record_memory_history(stacks="python")
    kept = train(program, init_device_mesh("cuda", (RANKS,), mesh_dim_names=("dp",)))
    after = torch.cuda.memory_stats()
    (events,) = [one for one in torch.cuda.memory._snapshot()["device_traces"] if one]
    torch.cuda.memory._record_memory_history(enabled=None)
    del kept
    return {
        "sizes": [event["size"] for event in events if event["action"] == "alloc"],
        "before": stats["allocated_bytes.all.current"],
        "requested": after["requested_bytes.all.peak"] - stats["requested_bytes.all.current"],
        "allocated": after["allocated_bytes.all.peak"] - stats["allocated_bytes.all.current"],
        "reserved": after["reserved_bytes.all.peak"],
    }


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn(in_process, (str(folder), port), nprocs=RANKS)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


def requested_peak(one: RankEstimate) -> int:
    events = one.trace.events
    sign = (events.kind == Kind.ALLOC).astype(np.int64) - (events.kind == Kind.FREE_COMPLETED)
    return int(np.cumsum(sign * events.bytes).max())


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_rank_allocates_what_its_estimate_does(name: str, real: list[dict[str, Any]]) -> None:
    gpu = {(8, 0): "a100", (8, 9): "l4", (9, 0): "h100", (10, 0): "b200"}[torch.cuda.get_device_capability()]
    found = estimate_ranks(lambda _, mesh: train(PROGRAMS[name], mesh), RANKS, range(RANKS), gpu=gpu)
    for one in found.ranks:
        told, events = real[one.rank][name], one.trace.events
        assert events.bytes[events.kind == Kind.ALLOC].tolist() == told["sizes"]
        assert requested_peak(one) == told["requested"]
        assert one.estimate.peak_allocated_bytes == told["allocated"]
        if not told["before"]:
            assert one.estimate.peak_reserved_bytes == told["reserved"]
