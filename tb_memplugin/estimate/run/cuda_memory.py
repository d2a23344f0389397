"""The memory functions of `torch.cuda` and `torch.accelerator` in a fake run.

torch's own Python code runs; what it asks torch's C code is answered by the simulated allocator, through
which the ledger's events are replayed up to now, each only once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tb_memplugin.estimate.gpu_spec import GpuSpec
from tb_memplugin.estimate.run.fake_ledger import Block as Request
from tb_memplugin.estimate.run.fake_ledger import FakeLedger
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode
from tb_memplugin.estimate.run.patches import Patches, do_nothing
from tb_memplugin.simulator.allocator_settings import AllocatorSettings
from tb_memplugin.simulator.caching_allocator import FREE, LIVE, Block, CachingAllocator
from tb_memplugin.trace.allocator import DEFAULT_POOL, PoolId

METRICS = (
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
)
"""Statistics that torch has for all memory, and for the pools of small and of large blocks."""

POOLS = ("all", "small_pool", "large_pool")
COUNTS = ("num_alloc_retries", "num_ooms", "num_sync_all_streams", "max_split_size")
OVERSIZE = ("oversize_allocations", "oversize_segments")


@dataclass(slots=True)
class Statistic:
    """A level: its value, its highest value, and what was added and removed in all."""

    current: int = 0
    peak: int = 0
    allocated: int = 0
    freed: int = 0

    def add(self, amount: int) -> None:
        """Change the level by an amount, which may be negative."""
        self.current += amount
        if amount > 0:
            self.allocated += amount
            if self.current > self.peak:
                self.peak = self.current
        else:
            self.freed -= amount


class LiveAllocator:
    """The simulated allocator of one device of a running estimate.

    Args:
        ledger: what is allocated and freed.
        device: the row of the device in the ledger.
    """

    def __init__(self, ledger: FakeLedger, device: int, settings: AllocatorSettings) -> None:
        self._ledger, self._device, self._settings = ledger, device, settings
        self._begin()

    def _begin(self) -> None:
        self._allocator = CachingAllocator(self._settings)
        self._blocks: dict[Request, Block] = {}
        self._pools: set[PoolId] = set()
        self._seen_entries = self._seen_changes = 0
        self._statistics = {(metric, pool): Statistic() for metric in METRICS for pool in POOLS}

    def statistics(self) -> dict[str, Any]:
        """Return what `torch._C._cuda_memoryStats` returns: nested dicts; sizes in bytes."""
        self._catch_up()
        stats: dict[str, Any] = {
            metric: {pool: asdict(self._statistics[metric, pool]) for pool in POOLS} for metric in METRICS
        }
        stats |= {name: asdict(Statistic()) for name in OVERSIZE} | dict.fromkeys(COUNTS, 0)
        segments = self._statistics["segment", "all"]
        return stats | {
            "num_device_alloc": segments.allocated,
            "num_device_free": segments.freed,
            "max_split_size": -1,
        }

    def reset_peaks(self) -> None:
        """Begin the peaks anew at the levels of now."""
        self._catch_up()
        for statistic in self._statistics.values():
            statistic.peak = statistic.current

    def reset_totals(self) -> None:
        """Begin what was added and removed in all anew."""
        self._catch_up()
        for statistic in self._statistics.values():
            statistic.allocated = statistic.freed = 0

    def segments(self) -> list[dict[str, Any]]:
        """Return the segments as in a memory snapshot, without stacks and traces."""
        self._catch_up()
        sizes = {block.address: request.bytes for request, block in self._blocks.items()}
        heads = {id(head): head for head in map(_first_of_segment, self._every_block())}
        in_order = sorted(heads.values(), key=lambda head: head.address)
        return [_segment(head, sizes, self._device) for head in in_order]

    def _every_block(self) -> Iterator[Block]:
        yield from self._blocks.values()
        for pool in sorted(self._pools):
            for small in (False, True):
                yield from self._allocator.half(pool, small).in_order()

    def _catch_up(self) -> None:
        """Replay the events since the last call."""
        entries = self._ledger.entries
        if len(entries) < self._seen_entries:  # the ledger forgot what was freed
            self._begin()
        for position in range(self._seen_entries, len(entries)):
            _, is_alloc, request, _, _ = entries[position]
            if request.device != self._device:
                continue
            if request.empties_cache:
                self._allocator.empty_cache()
                self._note_segments()
            elif is_alloc:
                self._allocate(request)
            elif request in self._blocks:
                self._free(request)
        self._seen_entries = len(entries)

    def _allocate(self, request: Request) -> None:
        block = self._allocator.malloc(request.bytes, request.stream, request.pool)
        if block is None:  # the device has no limit here
            return
        self._blocks[request] = block
        self._pools.add(request.pool)
        self._note_segments()
        small, behind = block.home.small, block.next
        rest = behind.size if behind is not None and behind.state == FREE else 0
        last = behind if behind is not None and rest else block
        if block.prev is None and last.next is None:  # a whole segment before, which is not split
            self._add(small, inactive_split=int(rest > 0), inactive_split_bytes=rest)
        else:
            self._add(small, inactive_split=int(rest > 0) - 1, inactive_split_bytes=-block.size)
        self._add(small, allocation=1, active=1, requested_bytes=request.bytes)
        self._add(small, allocated_bytes=block.size, active_bytes=block.size)

    def _free(self, request: Request) -> None:
        block = self._blocks.pop(request)
        size, small = block.size, block.home.small
        beside = (other for other in (block.prev, block.next) if other is not None)
        neighbours = [other for other in beside if other.state == FREE]
        self._allocator.free(block)
        self._add(small, allocation=-1, active=-1, requested_bytes=-request.bytes)
        self._add(small, allocated_bytes=-size, active_bytes=-size)
        joined = sum(other.size for other in neighbours)
        if block.is_whole:
            self._add(small, inactive_split=-len(neighbours), inactive_split_bytes=-joined)
        else:
            self._add(small, inactive_split=1 - len(neighbours), inactive_split_bytes=size)

    def _note_segments(self) -> None:
        """Count the segments that came and went since the last call."""
        changes = self._allocator.changes
        for change in changes[self._seen_changes :]:
            small = change.bytes <= self._settings.segment_size(1)
            self._add(small, segment=1 if change.growth > 0 else -1, reserved_bytes=change.growth)
        self._seen_changes = len(changes)

    def _add(self, small: bool, **amounts: int) -> None:
        pool = POOLS[1] if small else POOLS[2]
        for metric, amount in amounts.items():
            if amount:
                self._statistics[metric, "all"].add(amount)
                self._statistics[metric, pool].add(amount)


def _first_of_segment(block: Block) -> Block:
    while block.prev is not None:
        block = block.prev
    return block


def _segment(head: Block, requested: dict[int, int], device: int) -> dict[str, Any]:
    blocks, block = [], head
    while True:
        live = block.state == LIVE
        state = "active_allocated" if live else "inactive"
        size = requested.get(block.address, block.size) if live else 0
        fields = {"address": block.address, "size": block.size, "requested_size": size, "state": state}
        blocks.append({**fields, "frames": []})
        if block.next is None:
            break
        block = block.next
    alive = [each for each in blocks if each["state"] == "active_allocated"]
    return {
        "device": device,
        "address": head.address,
        "total_size": sum(each["size"] for each in blocks),
        "allocated_size": sum(each["size"] for each in alive),
        "active_size": sum(each["size"] for each in alive),
        "requested_size": sum(each["requested_size"] for each in alive),
        "stream": head.home.stream,
        "segment_type": "small" if head.home.small else "large",
        "segment_pool_id": head.home.pool.id,
        "is_expandable": head.origin >= 0,
        "frames": [],
        "blocks": blocks,
    }


class CudaMemory:
    """Answers for the devices of one fake run.

    Args:
        gpu: the target GPU; None for a device of unknown size.
    """

    def __init__(
        self,
        mode: CountingFakeMode,
        gpu: GpuSpec | None,
        settings: AllocatorSettings,
        note: Callable[[str], None],
    ) -> None:
        self._mode, self._gpu, self._settings, self._note = mode, gpu, settings, note
        self._allocators: dict[int, LiveAllocator] = {}
        self._raw: dict[int, Any] = {}
        self._fraction = 1.0

    def answers(self) -> dict[str, Callable[..., Any]]:
        """Return what stands in for functions of `torch._C`, by name."""
        return {
            "_cuda_memoryStats": self._statistics,
            "_cuda_resetPeakMemoryStats": lambda device: self._of(device).reset_peaks(),
            "_cuda_resetAccumulatedMemoryStats": lambda device: self._of(device).reset_totals(),
            "_cuda_hostMemoryStats": self._host_statistics,
            "_cuda_resetPeakHostMemoryStats": do_nothing,
            "_cuda_resetAccumulatedHostMemoryStats": do_nothing,
            "_cuda_memorySnapshot": self._snapshot,
            "_cuda_emptyCache": self._empty_cache,
            "_cuda_getMemoryFraction": lambda _device: self._fraction,
            "_cuda_setMemoryFraction": self._limit,
            "_cuda_getAllocatorBackend": lambda: "native",
            "_cuda_cudaCachingAllocator_raw_alloc": self._allocate,
            "_cuda_cudaCachingAllocator_raw_delete": self._delete,
            "_cuda_cudaCachingAllocator_enable": self._enable,
            "_cuda_cudaCachingAllocator_is_enabled": lambda: True,
            "_cuda_record_memory_history": self._history,
            "_cuda_record_memory_history_legacy": self._history,
            "_cuda_isHistoryEnabled": lambda: False,
            "_cuda_setMemoryMetadata": do_nothing,
            "_cuda_getMemoryMetadata": str,
            "_accelerator_isAllocatorInitialized": lambda: True,
            "_accelerator_getDeviceStats": self._statistics,
            "_accelerator_resetPeakStats": lambda device: self._of(device).reset_peaks(),
            "_accelerator_resetAccumulatedStats": lambda device: self._of(device).reset_totals(),
            "_accelerator_emptyCache": self._empty_cache,
            "_accelerator_emptyHostCache": do_nothing,
            "_accelerator_getMemoryInfo": self.free_and_total,
        }

    def apply(self, patches: Patches) -> None:
        """Replace the functions. What they are read from on import is replaced, too."""
        for name, answer in self.answers().items():
            patches.set(torch._C, name, answer)
        patches.set(torch.cuda.memory, "mem_get_info", self.free_and_total)
        patches.set(torch.cuda, "mem_get_info", self.free_and_total)
        patches.set(torch.cuda, "device_memory_used", lambda device=None: self._used(device))
        patches.set(torch.cuda.memory, "_dump_snapshot", self._not_dumped)
        patches.set(torch.cuda.memory, "_record_memory_history", self._history)

    def free_and_total(self, device: Any = None) -> tuple[int, int]:
        """Return the free and all bytes of the GPU; what PyTorch reserves and the context are not free."""
        total = self._gpu.memory_bytes if self._gpu is not None else 0
        return max(total - self._used(device), 0), total

    def _used(self, device: Any) -> int:
        context = (self._gpu.context_bytes or 0) if self._gpu is not None else 0
        reserved: int = self._statistics(device)["reserved_bytes"]["all"]["current"]
        return reserved + context

    def _statistics(self, device: Any = None) -> dict[str, Any]:
        return self._of(device).statistics()

    def _of(self, device: Any) -> LiveAllocator:
        wanted = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
        ledger = self._mode.ledger
        self._mode.settle(self._mode.layers.scope())
        row = ledger.device_row(torch.device("cuda", wanted.index or 0))
        if row not in self._allocators:
            self._allocators[row] = LiveAllocator(ledger, row, self._settings)
        return self._allocators[row]

    def _host_statistics(self) -> dict[str, Any]:
        self._note(
            "The program asks for statistics of pinned host memory, which is not counted: it gets none."
        )
        return {}

    def _snapshot(self, asked: Sequence[int] = (), *_: Any) -> dict[str, Any]:
        self._note("The program asks for a memory snapshot: it gets the segments, without a history.")
        segments, pool = self._of(0).segments(), tuple(asked[:2])
        if pool not in ((), DEFAULT_POOL):  # all pools, as torch does
            segments = [segment for segment in segments if segment["segment_pool_id"] == pool]
        return {
            "segments": segments,
            "device_traces": [[]],
            "allocator_settings": {},
            "external_annotations": [],
        }

    def _history(self, *_: Any, **__: Any) -> None:
        self._note("torch.cuda.memory's own history is not recorded: --logdir and save() keep this one.")

    def _not_dumped(self, filename: Any = "dump_snapshot.pickle", **_: Any) -> None:
        self._note(f"No snapshot was written to {str(filename)[:80]}: use --logdir or save().")

    def _empty_cache(self) -> None:
        scope = self._mode.layers.scope()
        self._mode.settle(scope)
        self._mode.ledger.empty_cache(scope)

    def _limit(self, fraction: float, _device: Any = None) -> None:
        self._fraction = fraction
        self._note(
            f"The program limits PyTorch to {fraction:.0%} of the GPU's memory; the estimate does not."
        )

    def _enable(self, _value: bool) -> None:
        self._note("The program switches the caching allocator on or off; the estimate keeps it on.")

    def _allocate(self, size: int, _stream: Any = 0) -> int:
        """Allocate memory without a tensor, and return its made-up address."""
        ledger, scope = self._mode.ledger, self._mode.layers.scope()
        row = ledger.device_row(torch.device("cuda", 0))
        block = ledger.allocate(size, row, "caching_allocator_alloc", scope)
        self._raw[block.address] = block
        return block.address

    def _delete(self, address: int) -> None:
        block = self._raw.pop(address, None)
        if block is not None:
            self._mode.ledger.free(block, self._mode.layers.scope())
