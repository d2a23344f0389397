"""A program in several real processes over gloo, each under torch.profiler: what every rank allocated."""

from __future__ import annotations

import gc
import json
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.profiler import ProfilerActivity, profile

from tb_memplugin.estimate.ranks import RankEstimate
from tb_memplugin.trace import Category, Kind

SMALLEST = 512
"""Bytes. Smaller ones are numbers, and a transport's own notes."""

Sizes = tuple[list[int], int]
"""Bytes of each allocation in order, and their peak."""


Program = Callable[[], object]
"""One that can be pickled, and is called where torch.distributed is initialized."""


def really(programs: Mapping[str, Program], ranks: int, folder: Path) -> dict[str, list[Sizes]]:
    """Run programs in processes, one after the other; by name what each rank allocated.

    Without the buffers of gloo and of kernels of the CPU, and without what a program keeps for the next.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn(_rank, (dict(programs), ranks, str(folder), port), nprocs=ranks)
    told = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    return {name: [tuple(one[name]) for one in told] for name in programs}


def sizes(one: RankEstimate, category: str = "") -> list[int]:
    """Bytes of each allocation from 512 B up, of one category or all."""
    blocks = one.trace.allocations
    return [
        int(blocks.bytes[row])
        for row in range(len(blocks))
        if blocks.bytes[row] >= SMALLEST
        and (not category or Category(int(blocks.category[row])).key == category)
    ]


def peak(one: RankEstimate) -> int:
    """The most that is held in allocations from 512 B up."""
    events = one.trace.events
    sign = np.where(events.kind == Kind.ALLOC, 1, -1)
    return int(np.cumsum(np.where(events.bytes >= SMALLEST, sign * events.bytes.astype(np.int64), 0)).max())


def _rank(rank: int, programs: Mapping[str, Program], ranks: int, folder: str, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    found = {name: _profiled(program) for name, program in programs.items()}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _profiled(program: Program) -> Sizes:
    gc.collect()  # of the program before
    with (
        torch.autograd.set_multithreading_enabled(False),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        kept = program()
    del kept
    tree = profiler.profiler.kineto_results.experimental_event_tree()
    changes = sorted(_changes(tree, "", False))
    found, most = [], 0
    held: dict[int, int] = {}  # by address; one that is taken again was freed by a thread of gloo, unseen
    for _, change, address, apart in changes:
        held.pop(address, None)
        if change >= SMALLEST and not apart:
            held[address] = change
            found.append(change)
            most = max(most, sum(held.values()))
    return found, most


def _changes(events: Any, parent: str, apart: bool) -> Iterator[tuple[int, int, int, bool]]:
    """(time, bytes, address, whether in a collective or a kernel's own) of allocations and frees."""
    for event in events:
        if event.typed[0].name == "Allocation":
            found = event.typed[1]
            yield event.start_time_ns, found.alloc_size, found.ptr, apart
        packs = event.name == "aten::empty" and parent in ("aten::mm", "aten::addmm")
        packs |= event.name == "aten::_chunk_cat"  # pads on the CPU; CUDA has a kernel for it
        packs |= event.name == "aten::arange" and parent == "aten::sort"
        collective = event.name.startswith(("c10d::", "gloo:"))
        yield from _changes(event.children, event.name, apart or packs or collective)


def differences(found: Sequence[RankEstimate], real: Sequence[Sizes], late: int) -> list[str]:
    """Where estimates are not as real ranks were; none if all allocations are, and the peaks.

    A thread of gloo may let go of what it sent a moment late: a real peak may be up to `late` bytes higher.
    """
    told = []
    for one, (real_sizes, real_peak) in zip(found, real, strict=True):
        if sizes(one) != real_sizes:
            told.append(f"rank {one.rank}: {sizes(one)} instead of {real_sizes}")
        if not peak(one) <= real_peak <= peak(one) + late:
            told.append(f"rank {one.rank}: a peak of {peak(one)} instead of {real_peak}")
    return told
