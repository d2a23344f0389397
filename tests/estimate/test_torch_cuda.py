"""Tests that `torch.cuda` answers in an estimate as on the GPU: functions and figures."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from tb_memplugin import MemoryEstimator, MemPluginError
from tb_memplugin.estimate.gpu_spec import GpuSpec

MIB = 1 << 20
MODULES = (torch.cuda, torch.cuda.nvtx, torch.cuda.profiler, torch.cuda.tunable, torch.accelerator)

REFUSED = {
    "get_device_capability": "_accelerator_getDeviceCapability",  # torch.accelerator's; torch.cuda's answers
    "current_blas_handle": "_cuda_getCurrentBlasHandle",
    "current_solver_handle": "_cuda_getCurrentSolverHandle",
    "change_current_allocator": "_cuda_changeCurrentAllocator",
}
"""Functions that no estimate can answer, and what the error names."""

NOT_CALLED = {
    "CUDAPluggableAllocator": "loads a library of the user's",
    "GreenContext": "needs a driver",
    "Graph": "torch refuses it for CUDA",
    "device_of": "tested below, with a tensor",
    "use_mem_pool": "tested below",
    "graph": "tested below",
    "make_graphed_callables": "tested below",
}


class _Allocator:
    def allocator(self) -> int:
        return 0


ARGUMENTS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "caching_allocator_alloc": lambda: (512,),
    "caching_allocator_delete": lambda: (0,),
    "caching_allocator_enable": lambda: (True,),
    "can_device_access_peer": lambda: (0, 0),
    "change_current_allocator": lambda: (_Allocator(),),
    "check_error": lambda: (0,),
    "CudaError": lambda: (0,),
    "get_stream_from_external": lambda: (77,),
    "ExternalStream": lambda: (77,),
    "set_per_process_memory_fraction": lambda: (0.5,),
    "set_rng_state": lambda: (torch.zeros(16, dtype=torch.uint8),),
    "set_rng_state_all": lambda: ([torch.zeros(16, dtype=torch.uint8)],),
    "set_stream": lambda: (torch.cuda.current_stream(),),
    "stream": lambda: (torch.cuda.current_stream(),),
    "StreamContext": lambda: (torch.cuda.current_stream(),),
    **dict.fromkeys(("manual_seed", "manual_seed_all", "set_device", "set_device_index"), lambda: (0,)),
    **dict.fromkeys(("set_device_idx", "device_index", "device", "range_end"), lambda: (0,)),
    "set_sync_debug_mode": lambda: (0,),
    **dict.fromkeys(("range", "range_push", "range_start", "mark"), lambda: ("forward",)),
    **dict.fromkeys(("enable", "tuning_enable", "record_untuned_enable"), lambda: (True,)),
    **dict.fromkeys(("set_max_tuning_duration", "set_max_tuning_iterations"), lambda: (1,)),
    **dict.fromkeys(("set_filename", "tune_gemm_in_file", "mgpu_tune_gemm_in_file"), lambda: ("a.csv",)),
    **dict.fromkeys(("set_rotating_buffer_size", "set_numerical_check_tolerances"), lambda: (1,)),
}


def _functions() -> list[tuple[ModuleType, str]]:
    public = []
    for module in MODULES:
        for name in getattr(module, "__all__", dir(module)):
            value = getattr(module, name, None)
            is_constructor = name.endswith(("Tensor", "Storage"))  # refused by torch itself without CUDA
            if callable(value) and not inspect.ismodule(value) and not is_constructor:
                public.append((module, name))
    return public


def test_every_public_function_answers_or_says_why_not() -> None:
    failed = {}
    with MemoryEstimator(gpu="h100"):
        for module, name in _functions():
            if name in NOT_CALLED or name.startswith("_"):
                continue
            try:
                getattr(module, name)(*ARGUMENTS.get(name, tuple)())
            except MemPluginError as error:
                if REFUSED.get(name, name) not in str(error):
                    failed[f"{module.__name__}.{name}"] = str(error)
            except Exception as error:  # noqa: BLE001  # each is listed
                failed[f"{module.__name__}.{name}"] = repr(error)
    assert not failed


def test_figures_are_those_of_the_allocator() -> None:
    with MemoryEstimator(gpu="h100") as estimator:
        small = torch.zeros(100, device="cuda")  # 400 bytes: a block of 512 in a segment of 2 MiB
        large = torch.zeros(3 * MIB // 4, device="cuda")  # 3 MiB in a segment of 20 MiB
        # 19.5 MiB of 20 MiB are left whole: the rest of a large segment is split off above 1 MiB alone.
        whole = torch.zeros(39 * MIB // 8, device="cuda", dtype=torch.float32)
        assert torch.cuda.memory_allocated() == 512 + 3 * MIB + 20 * MIB
        assert torch.cuda.memory_reserved() == (2 + 20 + 20) * MIB
        stats = torch.cuda.memory_stats()
        assert stats["requested_bytes.all.current"] == 400 + 3 * MIB + 39 * MIB // 2
        assert stats["inactive_split_bytes.all.current"] == 2 * MIB - 512 + 17 * MIB
        assert stats["segment.small_pool.current"] == 1
        free, total = torch.cuda.mem_get_info()
        assert total - free == torch.cuda.device_memory_used() >= 42 * MIB
        assert "23552 KiB" in torch.cuda.memory_summary()  # 512 bytes and 23 MiB
        assert sum(segment["total_size"] for segment in torch.cuda.memory_snapshot()) == 42 * MIB
        del large, whole
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == torch.accelerator.memory_reserved() == 2 * MIB
        assert torch.cuda.max_memory_reserved() == 42 * MIB
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == 512
        del small
    estimate = estimator.estimate()
    assert (estimate.peak_allocated_bytes, estimate.peak_reserved_bytes) == (512 + 23 * MIB, 42 * MIB)


def test_a_cache_that_was_emptied_is_reserved_anew() -> None:
    with MemoryEstimator(gpu="h100") as estimator:
        first = torch.zeros(8 * MIB, device="cuda")  # 32 MiB
        del first
        torch.cuda.empty_cache()
        torch.zeros(16 * MIB, device="cuda")  # 64 MiB: the cached 32 MiB would stay beside it
    assert estimator.estimate().peak_reserved_bytes == 64 * MIB


def test_workspaces_that_the_program_clears_are_freed_and_allocated_anew() -> None:
    with MemoryEstimator(gpu="h100"):
        square = torch.zeros(256, 256, device="cuda")  # 256 KiB
        for _ in range(2):
            square @ square
            assert torch.cuda.memory_allocated() == 32 * MIB + MIB // 4
            torch._C._cuda_clearCublasWorkspaces()
            assert torch.cuda.memory_allocated() == MIB // 4


def test_programs_may_divide_by_a_time_and_ask_what_torch_was_built_with() -> None:
    with MemoryEstimator(gpu="h100") as estimator:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        assert begin.elapsed_time(end) == 1.0
        assert torch.__config__.show()
        assert torch._C._cuda_getCurrentRawStream(0) == 0
        with torch.cuda.stream(torch.cuda.Stream()) as _:
            assert torch._C._cuda_getCurrentRawStream(0) == torch.cuda.current_stream().cuda_stream != 0
    assert [note for note in estimator.estimate().notes if "1.0 ms" in note]


def test_data_parallel_runs_on_the_only_gpu() -> None:
    peaks = []
    for wrap in (torch.nn.DataParallel, torch.nn.Identity):
        with MemoryEstimator(gpu="h100") as estimator:
            model: Any = wrap(torch.nn.Linear(512, 512, device="cuda"))
            if wrap is torch.nn.Identity:
                model = torch.nn.Linear(512, 512, device="cuda")
            batch = torch.zeros(64, 512)
            model(batch if wrap is torch.nn.DataParallel else batch.cuda()).sum().backward()
        peaks.append(estimator.estimate().peak_allocated_bytes)
    assert peaks[0] == peaks[1] > 512 * 512 * 4 * 2


def test_what_a_graph_captures_is_in_a_pool_of_its_own() -> None:
    with MemoryEstimator(gpu="h100") as estimator:
        given = torch.zeros(MIB, device="cuda")  # 4 MiB
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            assert torch.cuda.is_current_stream_capturing()
            static = given * 2
        assert not torch.cuda.is_current_stream_capturing()
        graph.replay()
        after = given * 3
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            pooled = given * 4
        assert [segment["requested_size"] for segment in pool.snapshot()] == [4 * MIB]
        called: Any = torch.cuda.make_graphed_callables(
            torch.nn.Linear(4, 4).cuda(), (torch.zeros(2, 4).cuda(),)
        )
        with torch.cuda.device_of(given):
            assert called(torch.zeros(2, 4).cuda()).shape == (2, 4)
        segments = {tuple(segment["segment_pool_id"]) for segment in torch.cuda.memory_snapshot()}
        assert len(segments) >= 3
        del static, after, pooled
    assert len(estimator.trace_result().pools) >= 3


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda", 0)])
def test_generators_are_of_the_device_that_is_named(device: Any) -> None:
    with MemoryEstimator(gpu="h100"):
        generator = torch.Generator(device=device).manual_seed(3)
        assert generator.device.type == "cuda"
        assert torch.randn(4, device="cuda", generator=generator).shape == (4,)


def test_classes_are_classes() -> None:
    replaced = ("device", "ExternalStream", "Stream", "StreamContext", "Event", "CUDAGraph", "MemPool")
    with MemoryEstimator(gpu="h100"):
        assert all(isinstance(getattr(torch.cuda, name), type) for name in (*replaced, "device_of"))
        assert isinstance(torch.Generator, type)  # dynamo asks `isinstance(value, torch.cuda.StreamContext)`


def test_a_graphs_stream_is_of_its_own_estimate() -> None:
    peaks = []
    for _ in range(2):
        with MemoryEstimator(gpu="h100") as estimator:
            weight = torch.zeros(64, 64, device="cuda")
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                weight @ weight  # the first workspace, of 32 MiB
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                weight @ weight  # the second, of the graph's own stream
        peaks.append(estimator.estimate().workspace_bytes)
    assert peaks == [64 * MIB, 64 * MIB]


@pytest.mark.parametrize("name", GpuSpec.names())
def test_a_gpu_has_its_drivers_name(name: str) -> None:
    with MemoryEstimator(gpu=name):
        told = torch.cuda.get_device_name()
        assert told == torch.cuda.get_device_properties(0).name
    assert told.startswith(("NVIDIA ", "Tesla "))
    assert GpuSpec.named(told) == GpuSpec.named(name)


def test_a_gpu_of_no_kind_in_particular_has_the_properties_whose_kernels_count() -> None:
    """autocast asks whether the GPU computes in bfloat16: an A100 does."""
    with MemoryEstimator(gpu=None), torch.autocast("cuda", torch.bfloat16):
        product = torch.ones(4, 8, device="cuda") @ torch.ones(8, 4, device="cuda")
        assert product.dtype is torch.bfloat16
        assert torch.cuda.get_device_capability() == (8, 0)
