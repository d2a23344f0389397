"""Run a program in several real processes over gloo under torch.profiler, and compare their allocations."""

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
"""Smaller allocations (bytes) are ignored: they are single numbers, and bookkeeping of the transport."""

Sizes = tuple[list[int], int, list[int]]
"""Bytes of each allocation in order, their peak, and the rows of those that are autograd's sums."""


Change = tuple[int, int, int, bool, bool]
"""(nanoseconds, bytes, address, whether it is a collective's or kernel's, whether it is autograd's sum)."""

Program = Callable[[], object]
"""A function that can be pickled. It is called where torch.distributed is initialized."""


def really(programs: Mapping[str, Program], ranks: int, folder: Path) -> dict[str, list[Sizes]]:
    """Run programs one after the other in `ranks` processes; return each rank's allocations by program.

    Buffers of gloo and of CPU kernels are left out, and memory that a program keeps for the next one.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn(_rank, (dict(programs), ranks, str(folder), port), nprocs=ranks)
    told = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    return {name: [tuple(one[name]) for one in told] for name in programs}


def sizes(one: RankEstimate, category: str = "") -> list[int]:
    """Return the bytes of each allocation of at least 512 bytes, of one category or all."""
    blocks = one.trace.allocations
    return [
        int(blocks.bytes[row])
        for row in range(len(blocks))
        if blocks.bytes[row] >= SMALLEST
        and (not category or Category(int(blocks.category[row])).key == category)
    ]


def peak(one: RankEstimate) -> int:
    """Return the peak of the allocations of at least 512 bytes."""
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
    gc.collect()  # frees what the previous program left
    with (
        torch.autograd.set_multithreading_enabled(False),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        kept = program()
    del kept
    tree = profiler.profiler.kineto_results.experimental_event_tree()
    changes = sorted(_changes(tree, "", False))
    found: list[int] = []
    sums: list[int] = []
    most = 0
    held: dict[int, int] = {}  # by address; if one is allocated again, a gloo thread freed it unrecorded
    for _, change, address, apart, summed in changes:
        held.pop(address, None)
        if change >= SMALLEST and not apart:
            held[address] = change
            sums += [len(found)] * summed
            found.append(change)
            most = max(most, sum(held.values()))
    return found, most, sums


def _changes(events: Any, parent: str, apart: bool, summed: bool = False) -> Iterator[Change]:
    """Yield the allocations and frees in a tree of events."""
    for event in events:
        if event.typed[0].name == "Allocation":
            found = event.typed[1]
            yield event.start_time_ns, found.alloc_size, found.ptr, apart, summed
        packs = event.name == "aten::empty" and parent in ("aten::mm", "aten::addmm")
        packs |= event.name == "aten::_chunk_cat"  # it pads on the CPU; CUDA has a kernel
        packs |= event.name == "aten::arange" and parent == "aten::sort"
        collective = event.name.startswith(("c10d::", "gloo:"))
        sums = event.name == "aten::add" and parent.startswith("autograd::engine")
        yield from _changes(event.children, event.name, apart or packs or collective, sums)


def differences(found: Sequence[RankEstimate], real: Sequence[Sizes], late: int) -> list[str]:
    """Return how estimates differ from real ranks; nothing if all allocations and the peaks agree.

    A gloo thread may release what it sent a moment late. Then a real peak is up to `late` bytes higher, and
    autograd, which adds to a gradient in place only if nothing else holds it, allocates a new one.
    """
    told = []
    for one, (real_sizes, real_peak, sums) in zip(found, real, strict=True):
        if not only_sums_more(real_sizes, sums, sizes(one)):
            told.append(f"rank {one.rank}: {_parting(sizes(one), real_sizes)}")
        if not peak(one) <= real_peak <= peak(one) + late:
            told.append(f"rank {one.rank}: a peak of {peak(one)} instead of {real_peak}")
    return told


def only_sums_more(real: Sequence[int], sums: Sequence[int], found: Sequence[int]) -> bool:
    """Return whether the real sizes are those found, except for some of autograd's sums."""
    left_out = {0}  # how many may have been left out so far
    for row, size in enumerate(real):
        kept = {count for count in left_out if found[row - count : row - count + 1] == [size]}
        left_out = kept | {count + 1 for count in left_out if row in sums}
    return len(real) - len(found) in left_out


def _parting(found: Sequence[int], real: Sequence[int]) -> str:
    """Describe where two long lists of sizes begin to differ, with the sizes around it."""
    same = next((i for i, (a, b) in enumerate(zip(found, real, strict=False)) if a != b), None)
    first = min(len(found), len(real)) if same is None else same
    around = slice(max(0, first - 5), first + 10)
    return (
        f"allocation {first} of {len(found)} and {len(real)}: "
        f"{list(found[around])} instead of {list(real[around])}"
    )
