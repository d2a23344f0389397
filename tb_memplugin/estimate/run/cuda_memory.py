"""The memory functions of `torch.cuda` and `torch.accelerator` in a fake run.

torch's own Python code runs; what it asks torch's C code is answered by the simulated allocator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tb_memplugin.estimate.gpu_spec import GpuSpec
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode
from tb_memplugin.estimate.run.live_allocator import LiveAllocator
from tb_memplugin.estimate.run.patches import Patches
from tb_memplugin.simulator.allocator_settings import AllocatorSettings
from tb_memplugin.trace.allocator import DEFAULT_POOL


class CudaMemory:
    """Answers for the devices of one fake run.

    Args:
        mode: the fake run.
        gpu: the target GPU; None for a device of unknown size.
        settings: of the allocator.
        note: called with sentences for the reader of the estimate.
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
            "_cuda_resetPeakHostMemoryStats": _nothing,
            "_cuda_resetAccumulatedHostMemoryStats": _nothing,
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
            "_cuda_setMemoryMetadata": _nothing,
            "_cuda_getMemoryMetadata": str,
            "_accelerator_isAllocatorInitialized": lambda: True,
            "_accelerator_getDeviceStats": self._statistics,
            "_accelerator_resetPeakStats": lambda device: self._of(device).reset_peaks(),
            "_accelerator_resetAccumulatedStats": lambda device: self._of(device).reset_totals(),
            "_accelerator_emptyCache": self._empty_cache,
            "_accelerator_emptyHostCache": _nothing,
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


def _nothing(*_: Any, **__: Any) -> None:
    return None
