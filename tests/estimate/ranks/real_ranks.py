"""Run a program in several real processes over gloo under torch.profiler, and compare their allocations."""

from __future__ import annotations

import gc
import json
import os
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
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


@dataclass(frozen=True)
class RealRank:
    """The allocations of one process, in order of time.

    Attributes:
        sizes: bytes of each allocation.
        sums: rows of those that are autograd's sums.
        late: rows of those whose end is not recorded: the last to hold them was one of gloo's threads, which
            may release what it sent or received some time after the program did.
        order: 1 + row where an allocation is made, -(1 + row) where it is freed.
    """

    sizes: list[int]
    sums: list[int]
    late: list[int]
    order: list[int]

    def peak(self, without: Collection[int] = ()) -> int:
        """Return the peak in bytes, without some rows."""
        live = most = 0
        for change in self.order:
            row = abs(change) - 1
            if row not in without:
                live += self.sizes[row] if change > 0 else -self.sizes[row]
                most = max(most, live)
        return most


Change = tuple[int, int, int, bool, bool]
"""(nanoseconds, bytes, address, whether it is a collective's or kernel's, whether it is autograd's sum)."""

Program = Callable[[], object]
"""A function that can be pickled. It is called where torch.distributed is initialized."""


def really(programs: Mapping[str, Program], ranks: int, folder: Path) -> dict[str, list[RealRank]]:
    """Run programs one after the other in `ranks` processes; return each rank's allocations by program.

    Buffers of gloo and of CPU kernels are left out, and memory that a program keeps for the next one.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn(_rank, (dict(programs), ranks, str(folder), port), nprocs=ranks)
    told = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    return {name: [RealRank(**one[name]) for one in told] for name in programs}


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
    found = {name: asdict(profiled(program)) for name, program in programs.items()}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def profiled(program: Program) -> RealRank:
    """Return the allocations of a program in this process."""
    gc.collect()  # frees what the previous program left
    with (
        torch.autograd.set_multithreading_enabled(False),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        kept = program()
        del kept
        gc.collect()  # so that what then has no end was freed by gloo's threads
    tree = profiler.profiler.kineto_results.experimental_event_tree()
    found = RealRank([], [], [], [])
    held: dict[int, int] = {}  # rows by address
    for _, change, address, apart, summed in sorted(_changes(tree, "", False)):
        if address in held:
            row = held.pop(address)
            found.order.append(-1 - row)
            if change > 0:
                found.late.append(row)
        if change >= SMALLEST and not apart:
            row = held[address] = len(found.sizes)
            found.sums.extend([row] * summed)
            found.sizes.append(change)
            found.order.append(1 + row)
    found.late.extend(held.values())
    return found


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


def differences(found: Sequence[RankEstimate], real: Sequence[RealRank]) -> list[str]:
    """Return how estimates differ from real ranks; nothing if all allocations and the peaks agree.

    When the program let go of what a thread of gloo freed is not known: the peak is at least that of all
    else, and at most that with all of it. And autograd, which adds to a gradient in place only if nothing
    else holds it, may have allocated a new one.
    """
    told = []
    for one, run in zip(found, real, strict=True):
        if not only_sums_more(run.sizes, run.sums, sizes(one)):
            told.append(f"rank {one.rank}: {_parting(sizes(one), run.sizes)}")
        forced = run.sums if len(run.sizes) > len(sizes(one)) else []
        least, most = run.peak({*run.late, *forced}), run.peak()
        if not least <= peak(one) <= most:
            told.append(f"rank {one.rank}: a peak of {peak(one)}, which is not in {least} to {most}")
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
