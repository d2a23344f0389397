"""Stand-ins for `torch.cuda` while an estimate runs without a GPU, as if the target were there."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch._subclasses import fake_tensor

from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.gpu_spec import GpuSpec
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode
from tb_memplugin.estimate.run.patches import Patches, do_nothing
from tb_memplugin.trace.allocator import DEFAULT_POOL, PoolId

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

    wait_stream = wait_event = synchronize = do_nothing

    def record_event(self, event: Any = None) -> Any:
        """Return an event that has already happened."""
        return event or FakeEvent()

    def query(self) -> bool:
        """Return True: all work is done."""
        return True

    def is_capturing(self) -> bool:
        """Return whether a CUDA graph is captured."""
        return bool(PrivatePools.entered)

    def __enter__(self) -> FakeStream:
        self.current.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.current.pop()


class FakeExternalStream(FakeStream):
    """A stand-in for `torch.cuda.ExternalStream`: a stream that the program made with CUDA itself."""

    def __init__(self, pointer: int, device: Any = None, **_: Any) -> None:
        super().__init__(device)
        self.cuda_stream = self.stream_id = pointer


class FakeStreamContext:
    """A stand-in for `torch.cuda.StreamContext`; None changes no stream."""

    def __init__(self, stream: FakeStream | None) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        if self._stream is not None:
            self._stream.__enter__()

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.__exit__()


class FakeEvent:
    """A stand-in for `torch.cuda.Event` that has always happened already."""

    note: ClassVar[Callable[[str], None]] = staticmethod(lambda _: None)

    def __init__(self, *_: Any, **__: Any) -> None: ...

    record = wait = synchronize = do_nothing

    def query(self) -> bool:
        """Return True: the event has happened."""
        return True

    def elapsed_time(self, other: Any) -> float:
        """Return 1.0 milliseconds: programs divide by it."""
        FakeEvent.note(
            "The time between two CUDA events is assumed to be 1.0 ms: no GPU works in an estimate."
        )
        return 1.0


def properties_of(gpu: GpuSpec) -> SimpleNamespace:
    """Return what `torch.cuda.get_device_properties` returns on a GPU, as far as it is known."""
    major, minor = gpu.compute_capability
    return SimpleNamespace(
        name=gpu.driver_name,
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
        L2_cache_size=50 << 20,  # an H100's (Hopper tuning guide), for every GPU, as on the stand-in
        is_integrated=0,
        is_multi_gpu_board=0,
        gcnArchName="",
    )


def describe(patches: Patches, gpu: GpuSpec) -> None:
    """Make `torch.cuda` report the name, compute capability and memory of the target GPU."""
    properties = properties_of(gpu)
    major, minor = gpu.compute_capability
    patches.set(torch.cuda, "get_device_properties", lambda device=None: properties)
    patches.set(torch.cuda, "get_device_capability", lambda device=None: (major, minor))
    patches.set(torch.cuda, "get_device_name", lambda device=None: gpu.driver_name)
    patches.set(torch.cuda, "is_bf16_supported", lambda including_emulation=True: major >= 8)


class FakeGenerator(torch.Generator):
    """A stand-in for `torch.Generator` that may be on the GPU: its numbers come from the CPU's."""

    def __new__(cls, device: Any = "cpu") -> FakeGenerator:
        """Make a generator of the CPU that tells the device that the program named."""
        generator = super().__new__(cls, "cpu")  # type: ignore[call-arg]  # torch's stub has no __new__
        generator.named_device = torch.device(device)
        return generator

    named_device: torch.device

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # a read-only attribute in C
        """The device that the program named."""
        return self.named_device


class _RandomState:
    """The seed and offset that all graphs share: two numbers on the GPU (CUDAGeneratorImpl.cpp)."""

    def __init__(self) -> None:
        self.seed = torch.empty(1, dtype=torch.int64, device="cuda")
        self.offset = torch.empty(1, dtype=torch.int64, device="cuda")


class FakeGraph:
    """A stand-in for `torch.cuda.CUDAGraph`: what is captured runs once, from a pool of the graph's own."""

    random_state: ClassVar[Callable[[], _RandomState | None]] = staticmethod(lambda: None)
    replayed: ClassVar[Callable[[], None]] = staticmethod(lambda: None)
    """Called by each replay."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._pool: PoolId | None = None
        self._random_state: _RandomState | None = None

    def capture_begin(self, pool: Any = None, *_: Any, **__: Any) -> None:
        """Let allocations come from the graph's pool, or from one that is given."""
        self._pool = pool if pool is not None else new_pool()
        PrivatePools.entered.append(self._pool)
        self._random_state = self._random_state or FakeGraph.random_state() or _RandomState()
        FakeGraph.random_state = weakref.ref(self._random_state)

    def capture_end(self) -> None:
        """Let allocations come from where they did before."""
        PrivatePools.entered.pop()

    def pool(self) -> PoolId:
        """Return the pool's id."""
        return self._pool or new_pool()

    def replay(self) -> None:
        """Allocate nothing, as a replay does."""
        FakeGraph.replayed()

    reset = instantiate = enable_debug_mode = debug_dump = do_nothing


class FakeMemPool:
    """A stand-in for `torch.cuda.MemPool`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.id = new_pool()

    def use_count(self) -> int:
        """Return 1: this object uses it."""
        return 1

    def snapshot(self, include_traces: bool = True) -> list[Any]:
        """Return the segments of this pool, as in a memory snapshot."""
        segments: list[Any] = torch.cuda.memory_snapshot(self.id, include_traces=include_traces)
        return segments


class PrivatePools:
    """The private pools of the fake run: which one is used now, and the next number."""

    entered: ClassVar[list[PoolId]] = []
    numbers: ClassVar[Iterator[int]] = count(1)

    @classmethod
    def begin(cls) -> None:
        """Forget all pools."""
        cls.entered.clear()
        cls.numbers = count(1)

    @classmethod
    def current(cls) -> PoolId:
        """Return the pool from which allocations come now."""
        return cls.entered[-1] if cls.entered else DEFAULT_POOL


def new_pool() -> PoolId:
    """Return the id of a new private pool."""
    return (0, next(PrivatePools.numbers))


def stand_in(patches: Patches, mode: CountingFakeMode, gpu: GpuSpec, note: Callable[[str], None]) -> None:
    """Make `torch.cuda` work as on a machine with one GPU. Most of its own Python code runs.

    What it asks torch's C code is answered; what no estimate can answer is refused, by name.
    """
    FakeStream.begin()
    PrivatePools.begin()
    FakeGraph.random_state = staticmethod(lambda: None)
    FakeEvent.note = staticmethod(note)
    current = FakeStream.current
    mode.ledger.stream = lambda: current[-1].cuda_stream
    mode.ledger.pool = PrivatePools.current
    answers: dict[Any, dict[str, Any]] = {
        torch._C: _in_c(gpu),
        torch.cuda: _in_python(note),
        torch: {"Generator": FakeGenerator},
        torch.cuda.graphs: {"is_current_stream_capturing": _capturing},
        torch.cuda.graph: {"default_capture_stream": None},  # the class would keep one of an earlier estimate
        torch.cuda.memory: {
            "MemPool": FakeMemPool,
            "_cuda_beginAllocateCurrentThreadToPool": lambda device, pool: PrivatePools.entered.append(pool),
            "_cuda_endAllocateToPool": lambda device, pool: PrivatePools.entered.pop(),
            "_cuda_releasePool": do_nothing,
        },
        torch.cuda.nvtx: {"_nvtx": _Nvtx},
        torch.cuda.tunable: {name: lambda *_, answer=answer: answer for name, answer in _TUNABLE.items()},
        torch.Tensor: {
            "record_stream": do_nothing,
            "pin_memory": lambda tensor, device=None: tensor,  # host memory is not counted
        },
        torch.backends.cudnn: {"is_available": lambda: True},
        fake_tensor: {"init_gpu_context": do_nothing},  # older versions do not ask avoid_device_init
    }
    modules = [module for name, module in sorted(sys.modules.items()) if name.startswith("torch.cuda.")]
    for owner, names in answers.items():
        for name, answer in names.items():
            original = vars(owner).get(name, do_nothing)
            imported = [module for module in modules if vars(module).get(name) is original]
            for module in (owner, *(imported if owner is torch.cuda else ())):
                patches.set(module, name, answer)


def _in_c(gpu: GpuSpec) -> dict[str, Any]:
    """Return what stands in for functions of `torch._C`."""
    current, sync_debug = FakeStream.current, [0]
    major, minor = gpu.compute_capability
    return {
        **dict.fromkeys(_FIRST_IN_C, lambda *_: 0),
        "_cuda_getDeviceCount": lambda: 1,
        "_cuda_canDeviceAccessPeer": lambda device, peer: False,
        "_cuda_getCurrentRawStream": lambda device: current[-1].cuda_stream,
        "_cuda_hasPrimaryContext": lambda device: True,
        "_cuda_getArchFlags": lambda: f"sm_{major}{minor}",
        "_cuda_get_sync_debug_mode": lambda: sync_debug[0],
        "_cuda_set_sync_debug_mode": lambda mode: sync_debug.__setitem__(0, mode),
        "_host_emptyCache": do_nothing,
        "_scatter": lambda tensor, devices, *_: (tensor.to(f"cuda:{devices[0]}"),),  # to the only device
        "_accelerator_getAccelerator": lambda: torch.device("cuda"),
        "_accelerator_getStream": lambda index: current[-1],
        "_accelerator_setStream": lambda stream: current.__setitem__(-1, stream),
        **dict.fromkeys(_NOTHING_IN_C, do_nothing),
        **{name: _refusing(name) for name in _REFUSED_IN_C},
    }


def _in_python(note: Callable[[str], None]) -> dict[str, Any]:
    """Return what stands in for functions and classes of `torch.cuda`."""
    current = FakeStream.current
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "_exchange_device": lambda index: 0,
        "_maybe_exchange_device": lambda index: 0,
        "current_stream": lambda device=None: current[-1],
        "default_stream": lambda device=None: current[0],
        "get_stream_from_external": FakeExternalStream,
        "ExternalStream": FakeExternalStream,
        "set_stream": lambda stream: current.__setitem__(-1, stream),
        "stream": FakeStreamContext,
        "StreamContext": FakeStreamContext,
        "is_current_stream_capturing": _capturing,
        "default_generators": (torch.Generator(),),
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "cudart": lambda: _CUDART,
        "_cudart": _CUDART,
        "list_gpu_processes": lambda device=None: "GPU:0\nno processes are running",
        "Stream": FakeStream,
        "Event": FakeEvent,
        "CUDAGraph": FakeGraph,
        "graph_pool_handle": new_pool,
        "MemPool": FakeMemPool,
        **dict.fromkeys(_NOTHING, do_nothing),
        **{name: _idle(name, note) for name in _MEASURED},
    }


def _capturing() -> bool:
    return bool(PrivatePools.entered)


_FIRST_IN_C = (
    *("_cuda_getDevice", "_accelerator_getDeviceIndex"),
    *("_accelerator_exchangeDevice", "_accelerator_maybeExchangeDevice"),
)
"""Functions that return the number of a device: there is one."""

_NOTHING_IN_C = (
    "_cuda_init",
    "_cuda_setDevice",
    "_cuda_synchronize",
    "_cuda_ipc_collect",
    "_cuda_sleep",
    "_accelerator_setDeviceIndex",
    "_accelerator_synchronizeDevice",
)
_SEEDS = ("manual_seed", "manual_seed_all", "seed", "seed_all")
_NOTHING = ("init", "_lazy_init", "_sleep", "set_rng_state", *_SEEDS)
_MEASURED = ("utilization", "memory_usage", "temperature", "power_draw", "clock_rate")
_REFUSED_IN_C = (
    "_accelerator_getDeviceCapability",
    "_cuda_getCurrentBlasHandle",
    "_cuda_getCurrentSolverHandle",
    "_cuda_customAllocator",
    "_cuda_changeCurrentAllocator",
    "_cuda_jiterator_compile_and_launch_kernel",
)
_TUNABLE: dict[str, Any] = {
    "is_enabled": False,
    "tuning_is_enabled": True,
    "record_untuned_is_enabled": False,
    "get_max_tuning_duration": 30,
    "get_max_tuning_iterations": 100,
    "get_filename": "",
    "get_results": (),
    "get_validators": (),
    "read_file": False,
    "get_rotating_buffer_size": 0,
    **dict.fromkeys(("enable", "tuning_enable", "record_untuned_enable", "set_max_tuning_duration")),
    **dict.fromkeys(("set_max_tuning_iterations", "set_filename", "set_rotating_buffer_size")),
    **dict.fromkeys(("set_numerical_check_tolerances", "tune_gemm_in_file", "mgpu_tune_gemm_in_file")),
}
"""What the functions of `torch.cuda.tunable` return where nothing is tuned."""


class _Nvtx:
    rangePushA = rangePop = rangeStartA = staticmethod(lambda *_: 0)  # noqa: N815  # CUDA's names
    rangeEnd = markA = deviceRangeStart = deviceRangeEnd = staticmethod(lambda *_: None)  # noqa: N815


class _CudaError(int):
    success: ClassVar[int] = 0


_CUDART = SimpleNamespace(
    cudaError=_CudaError,
    cudaGetErrorString=lambda code: "no error",
    cudaProfilerStart=lambda: 0,
    cudaProfilerStop=lambda: 0,
    cudaHostRegister=lambda *_: 0,
    cudaHostUnregister=lambda *_: 0,
    cudaStreamCreate=lambda *_: 0,
    cudaStreamDestroy=lambda *_: 0,
    cudaDeviceSynchronize=lambda: 0,
    cudaMemGetInfo=lambda device=0: torch.cuda.mem_get_info(device),
)
"""The functions of CUDA's runtime that torch offers."""


def _idle(name: str, note: Callable[[str], None]) -> Callable[..., int]:
    def answer(device: Any = None) -> int:
        note(f"torch.cuda.{name} returns 0: no GPU works in an estimate.")
        return 0

    return answer


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise MemPluginError(
            f"torch._C.{name} has no answer in an estimate: there is no CUDA library behind it.",
            where=name,
            fix="Leave that part out of the estimate.",
        )

    return refuse
