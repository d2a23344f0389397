"""Stand-ins for `torch.cuda` while an estimate runs without a GPU, as if the target were there."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch._subclasses import fake_tensor

from tb_memplugin.estimate.gpu_spec import GpuSpec
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode
from tb_memplugin.estimate.run.patches import Patches

_POOLED = 32
"""Streams of one priority; the next one is the first again (c10/cuda/CUDAStream.cpp, kStreamsPerPool)."""


class FakeStream:
    """A stand-in for `torch.cuda.Stream` whose work is always done."""

    device_index = 0
    device_type = 1
    current: ClassVar[list[FakeStream]] = []
    """The streams that were entered and not left, the default one first."""
    _numbers: ClassVar[Counter[int]] = Counter()

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device, self.priority = torch.device("cuda", 0), priority
        number = self._numbers[priority] % _POOLED
        self._numbers[priority] += 1
        self.cuda_stream = self.stream_id = 1 + 2 * number + (priority < 0)

    @classmethod
    def begin(cls) -> None:
        """Forget all streams, and create the default one: its pointer is 0."""
        default = cls()
        default.cuda_stream = default.stream_id = 0
        cls._numbers.clear()
        cls.current[:] = [default]

    def wait_stream(self, stream: Any) -> None:
        """Do nothing."""

    def wait_event(self, event: Any) -> None:
        """Do nothing."""

    def record_event(self, event: Any = None) -> Any:
        """Return an event that has already happened."""
        return event or FakeEvent()

    def synchronize(self) -> None:
        """Do nothing: all work is done."""

    def query(self) -> bool:
        """Return True: all work is done."""
        return True

    def __enter__(self) -> FakeStream:
        self.current.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.current.pop()


class FakeEvent:
    """A stand-in for `torch.cuda.Event` that has always happened already."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, stream: Any = None) -> None:
        """Do nothing: the event has already happened."""

    def wait(self, stream: Any = None) -> None:
        """Do nothing: the event has already happened."""

    def synchronize(self) -> None:
        """Do nothing: the event has already happened."""

    def query(self) -> bool:
        """Return True: the event has happened."""
        return True

    def elapsed_time(self, other: Any) -> float:
        """Return 0.0 milliseconds."""
        return 0.0


class _FakeDevice:
    def __init__(self, *_: Any) -> None: ...

    def __enter__(self) -> _FakeDevice:
        return self

    def __exit__(self, *_: object) -> None:
        return None


def properties_of(gpu: GpuSpec) -> SimpleNamespace:
    """Return what `torch.cuda.get_device_properties` returns on a GPU, as far as it is known."""
    major, minor = gpu.compute_capability
    return SimpleNamespace(
        name=gpu.name,
        major=major,
        minor=minor,
        total_memory=gpu.memory_bytes,
        multi_processor_count=gpu.processors,
        max_threads_per_multi_processor=gpu.threads,
        max_threads_per_block=1024,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=48 << 10,
        shared_memory_per_block_optin=gpu.shared_bytes,
        warp_size=32,
        gcnArchName="",
    )


def describe(patches: Patches, gpu: GpuSpec | None) -> None:
    """Make `torch.cuda` report the name, compute capability and memory of the target GPU."""
    if gpu is None:
        return
    properties = properties_of(gpu)
    major, minor = gpu.compute_capability
    patches.set(torch.cuda, "get_device_properties", lambda device=None: properties)
    patches.set(torch.cuda, "get_device_capability", lambda device=None: (major, minor))
    patches.set(torch.cuda, "get_device_name", lambda device=None: gpu.name)
    patches.set(torch.cuda, "is_bf16_supported", lambda including_emulation=True: major >= 8)


def count(patches: Patches, mode: CountingFakeMode, gpu: GpuSpec | None, note: Callable[[str], None]) -> None:
    """Make the memory functions of `torch.cuda` report the bytes of the fake run, and reset its peaks.

    Reserved bytes are only known at the end of the run. Allocated bytes are returned for them, with a note.
    """
    ledger = mode.ledger

    def of(levels: list[int], device: Any) -> int:
        wanted = torch.device("cuda", device) if isinstance(device, int) else torch.device(device or "cuda")
        name = f"cuda:{wanted.index or 0}"
        mode.settle(mode.layers.scope())
        return levels[ledger.devices.index(name)] if name in ledger.devices else 0

    def at_least(levels: list[int], device: Any) -> int:
        note(
            "The program asks torch.cuda how much memory is reserved. The allocated bytes are "
            "returned instead, because the reserved memory is simulated only at the end."
        )
        return of(levels, device)

    def reset(device: Any = None) -> None:
        mode.settle(mode.layers.scope())
        ledger.recent_peaks[:] = ledger.allocated

    def stats(device: Any = None) -> dict[str, int]:
        now, most = at_least(ledger.allocated, device), of(ledger.recent_peaks, device)
        kinds = ("allocated", "active", "reserved")
        current = {f"{kind}_bytes.all.current": now for kind in kinds}
        peaks = {f"{kind}_bytes.all.peak": most for kind in kinds}
        return current | peaks | {"num_alloc_retries": 0, "num_ooms": 0}

    answers: dict[str, Any] = {
        "memory_allocated": lambda device=None: of(ledger.allocated, device),
        "max_memory_allocated": lambda device=None: of(ledger.recent_peaks, device),
        "memory_reserved": lambda device=None: at_least(ledger.allocated, device),
        "max_memory_reserved": lambda device=None: at_least(ledger.recent_peaks, device),
        "reset_peak_memory_stats": reset,
        "reset_max_memory_allocated": reset,
        "memory_stats": stats,
        "memory_summary": lambda device=None, abbreviated=False: "\n".join(
            f"{key}: {size:,}" for key, size in stats(device).items()
        ),
    }
    if gpu is not None:
        total = gpu.memory_bytes
        answers["mem_get_info"] = lambda device=None: (total - of(ledger.allocated, device), total)
    owners = (torch.cuda, torch.cuda.memory, getattr(torch, "accelerator", None))
    for name, answer in answers.items():
        for owner in owners:
            if hasattr(owner, name):
                patches.set(owner, name, answer)


def stand_in(patches: Patches, mode: CountingFakeMode) -> None:
    """Make the `torch.cuda` calls work that programs use on a machine with one GPU."""
    FakeStream.begin()
    current = FakeStream.current
    mode.ledger.stream = lambda: current[-1].cuda_stream
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "current_stream": lambda device=None: current[-1],
        "default_stream": lambda device=None: current[0],
        "set_stream": lambda stream: current.__setitem__(-1, stream),
        "stream": lambda stream: stream if stream is not None else contextlib.nullcontext(),
        "is_current_stream_capturing": lambda: False,
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "device": _FakeDevice,
        "Stream": FakeStream,
        "Event": FakeEvent,
    }
    nothing: tuple[str, ...] = (
        "init",
        "_lazy_init",
        "set_device",
        "synchronize",
        "set_rng_state",
    )
    nothing += ("empty_cache", "manual_seed", "manual_seed_all")
    for name in nothing:
        answers[name] = _nothing
    for name, answer in answers.items():
        patches.set(torch.cuda, name, answer)
    patches.set(torch.Tensor, "record_stream", _nothing)
    patches.set(torch.Tensor, "pin_memory", lambda tensor, device=None: tensor)  # host memory is not counted
    patches.set(torch.backends.cudnn, "is_available", lambda: True)
    patches.set(fake_tensor, "init_gpu_context", _nothing)  # older versions do not ask avoid_device_init


def _nothing(*_: Any, **__: Any) -> None:
    return None
