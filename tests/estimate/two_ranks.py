"""Small trainings for two ranks: the same program in two real processes over gloo, and on fake tensors."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

STEPS = 3
SMALLEST = 512
"""Bytes. Smaller ones are numbers, and a transport's own notes."""

Sizes = tuple[list[int], int]
"""Bytes of each allocation in order, and their peak."""


def model() -> nn.Module:
    """Seven rows in the last layer: two ranks hold four and three of them."""
    return nn.Sequential(
        nn.Linear(256, 1024, bias=False), nn.ReLU(), nn.Linear(1024, 300), nn.ReLU(), nn.Linear(300, 7)
    )


def prepared(kind: str) -> nn.Module:
    whole = model()
    if kind == "FSDP2":
        mesh = init_device_mesh("cpu", (2,))
        for index in (0, 2, 4):
            fully_shard(whole[index], mesh=mesh)  # type: ignore[index]
        fully_shard(whole, mesh=mesh)
        return whole
    views = kind == "DDP with views"
    return DistributedDataParallel(whole, gradient_as_bucket_view=views, bucket_cap_mb=1)


def train(kind: str, pause: float = 0.0) -> nn.Module:
    """A few steps; `pause` seconds after each backward let gloo's threads let go of what they sent."""
    wrapped, batch = prepared(kind), torch.ones(32, 256)
    optimizer = torch.optim.Adam(wrapped.parameters(), foreach=False)
    for _ in range(STEPS):
        wrapped(batch).square().sum().backward()
        time.sleep(pause)
        optimizer.step()
        optimizer.zero_grad()
    return wrapped


def really(kind: str, folder: Path, port: int) -> list[Sizes]:
    """Run it in two processes; what each allocated, without the buffers of gloo and of kernels of the CPU."""
    spawn(_rank, (kind, str(folder), port), nprocs=2)
    return [tuple(json.loads((folder / f"{rank}.json").read_text())) for rank in range(2)]


def _rank(rank: int, kind: str, folder: str, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    with (
        torch.autograd.set_multithreading_enabled(False),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        train(kind, pause=0.1)
    tree = profiler.profiler.kineto_results.experimental_event_tree()
    changes = sorted(_changes(tree, "", False))
    sizes, peak = [], 0
    held: dict[int, int] = {}  # by address; one that is taken again was freed by a thread of gloo, unseen
    for _, change, address, apart in changes:
        held.pop(address, None)
        if change >= SMALLEST and not apart:
            held[address] = change
            sizes.append(change)
            peak = max(peak, sum(held.values()))
    Path(folder, f"{rank}.json").write_text(json.dumps((sizes, peak)))
    dist.destroy_process_group()


def _changes(events: Any, parent: str, apart: bool) -> Iterator[tuple[int, int, int, bool]]:
    """(time, bytes, address, whether in a collective or a kernel's own) of allocations and frees."""
    for event in events:
        if event.typed[0].name == "Allocation":
            found = event.typed[1]
            yield event.start_time_ns, found.alloc_size, found.ptr, apart
        packs = event.name == "aten::empty" and parent in ("aten::mm", "aten::addmm")
        packs |= event.name == "aten::_chunk_cat"  # pads on the CPU; CUDA has a kernel for it
        collective = event.name.startswith(("c10d::", "gloo:"))
        yield from _changes(event.children, event.name, apart or packs or collective)
