"""Tests for ranks of a job on fake tensors: against two real processes and sizes found by hand."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

from tb_memplugin import MemoryEstimator, MemPluginError
from tb_memplugin.estimate.ranks import RankEstimate, RankEstimates, estimate_ranks
from tb_memplugin.estimate.ranks.mesh import Mesh, parse_mesh
from tests.estimate.ranks.real_ranks import differences, really, sizes
from tests.estimate.ranks.two_ranks import KINDS, train

KIB, MIB = 1 << 10, 1 << 20


def on_cpu(build: Callable[..., object], mesh: Mesh | int | str, *ranks: int) -> RankEstimates:
    return estimate_ranks(build, mesh, ranks or None, device="cpu")


def alive(one: RankEstimate) -> int:
    """Return the bytes that are live at the end."""
    blocks = one.trace.allocations
    return int(blocks.bytes[blocks.freed >= len(one.trace.events)].sum())


def sharded(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    fully_shard(model, mesh=mesh, **options)
    return model


def step(model: nn.Module, *shape: int) -> nn.Module:
    model(torch.ones(shape)).square().sum().backward()
    return model


def test_two_ranks_allocate_what_two_real_processes_do(tmp_path: Path) -> None:
    """Three steps have the same allocations in order, without buffers of gloo and of CPU kernels."""
    real = really({kind: partial(train, kind, pause=0.1) for kind in KINDS}, 2, tmp_path)
    for kind in KINDS:
        found = on_cpu(lambda *_, kind=kind: train(kind), 2).ranks
        assert not differences(found, real[kind]), kind


def test_fsdp_holds_a_share_and_gathers_the_whole() -> None:
    """A linear layer of 256 x 256 float32 (256 KiB) on 8 ranks is 32 KiB on each."""

    def build(estimator: MemoryEstimator, mesh: DeviceMesh) -> nn.Module:
        return step(sharded(nn.Linear(256, 256, bias=False), mesh), 1, 256)

    found = on_cpu(build, 8)
    assert [one.rank for one in found.ranks] == [0, 7]
    for one in found.ranks:
        assert sizes(one, "parameter") == [32 * KIB]
        assert sizes(one, "gradient") == [32 * KIB]
        assert sizes(one, "communication") == [256 * KIB, 256 * KIB]  # to gather into, and to reduce from
        assert alive(one) == 2 * 32 * KIB


def test_fsdp_pads_uneven_shards() -> None:
    """10 rows of 128 floats on 4 ranks are 3, 3, 3 and 1; each rank allocates space for 3: 1,536 bytes."""

    def build(estimator: MemoryEstimator, mesh: DeviceMesh) -> nn.Module:
        return step(sharded(nn.Linear(128, 10, bias=False), mesh), 4, 128)

    for one in on_cpu(build, 4, 0, 1, 2, 3).ranks:
        assert sizes(one, "parameter") == [1536]
        assert sizes(one, "communication") == [4 * 1536, 4 * 1536]


def test_fsdp_gathers_in_the_type_of_its_policy() -> None:
    def build(estimator: MemoryEstimator, mesh: DeviceMesh) -> nn.Module:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        return step(sharded(nn.Linear(256, 256, bias=False), mesh, mp_policy=policy), 1, 256)

    (one,) = on_cpu(build, 8, 0).ranks
    assert sizes(one, "parameter") == [32 * KIB]
    assert sizes(one, "communication") == [128 * KIB, 256 * KIB]


def test_hsdp_shards_within_a_replica() -> None:
    """In 2 replicas of 4 ranks, each rank has a quarter of 256 KiB."""

    def build(estimator: MemoryEstimator, mesh: DeviceMesh) -> nn.Module:
        return step(sharded(nn.Linear(256, 256, bias=False), mesh), 1, 256)

    found = on_cpu(build, "replicate=2,shard=4")
    assert [one.coordinate for one in found.ranks] == [(0, 0), (0, 3), (1, 0), (1, 3)]
    for one in found.ranks:
        assert sizes(one, "parameter") == [64 * KIB]
        assert sizes(one, "gradient") == [64 * KIB]


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(256, 1024, bias=False), nn.ReLU(), nn.Linear(1024, 256, bias=False))


def test_tensor_parallel_layers_hold_a_share_and_reduce_the_result() -> None:
    """Layers of 4 x 256 KiB are divided over 4 ranks; 16 rows of 1 KiB are between them and the result."""

    def build(estimator: MemoryEstimator, mesh: DeviceMesh) -> nn.Module:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        return step(parallelize_module(layers(), mesh, plan), 16, 256)

    (one,) = on_cpu(build, "tp=4", 1).ranks
    assert sizes(one, "parameter") == [256 * KIB, 256 * KIB]
    assert sizes(one, "gradient") == [256 * KIB, 256 * KIB]
    assert sizes(one, "communication") == [16 * KIB]
    assert alive(one) == 4 * 256 * KIB


def test_sequence_parallel_layers_gather_what_tensor_parallel_ones_need() -> None:
    """8 tokens of 256 floats (8 KiB) on each of 4 ranks are gathered to 32 KiB."""

    def build(estimator: MemoryEstimator, mesh: DeviceMesh) -> nn.Module:
        plan = {
            "0": SequenceParallel(),
            "1": ColwiseParallel(input_layouts=Shard(1)),
            "3": RowwiseParallel(output_layouts=Shard(1)),
        }
        model = nn.Sequential(nn.LayerNorm(256), *layers())
        return parallelize_module(model, mesh, plan)(torch.ones(1, 8, 256))

    (one,) = on_cpu(build, "tp=4", 0).ranks
    assert sizes(one, "communication") == [32 * KIB, 8 * KIB]


def test_fsdp_over_tensor_parallel_layers_divides_twice() -> None:
    def build(estimator: MemoryEstimator, mesh: DeviceMesh) -> nn.Module:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        model = parallelize_module(layers(), mesh["tp"], plan)
        return step(sharded(model, mesh["dp"]), 16, 256)

    for one in on_cpu(build, "dp=2,tp=4").ranks:
        assert sizes(one, "parameter") == [128 * KIB, 128 * KIB]
        assert alive(one) == 4 * 128 * KIB


def data_parallel(**options: Any) -> Callable[..., nn.Module]:
    """Return a program that trains eight layers of 1 MiB for two steps."""

    def build(estimator: MemoryEstimator, mesh: DeviceMesh) -> nn.Module:
        model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8)))
        wrapped = DistributedDataParallel(model, **options)
        for _ in range(2):
            wrapped.zero_grad()
            step(wrapped, 1, 512)
        return wrapped

    return build


@pytest.mark.parametrize(("cap", "buckets"), [({}, [1, 7]), ({"bucket_cap_mb": 3}, [3, 3, 2])])
def test_ddp_has_one_bucket_first_and_then_its_own(cap: dict[str, int], buckets: list[int]) -> None:
    """The first backward uses one bucket of 8 MiB; then buckets are up to 1 and 25 MiB, or the given size."""
    (one,) = on_cpu(data_parallel(**cap), 4, 0).ranks
    assert sizes(one, "communication") == [size * MIB for size in (8, *buckets)]
    assert alive(one) == 3 * 8 * MIB  # parameters, gradients, buckets


def test_ddp_with_views_has_its_gradients_in_the_buckets() -> None:
    (one,) = on_cpu(data_parallel(gradient_as_bucket_view=True), 4, 0).ranks
    assert alive(one) == 2 * 8 * MIB


def with_hook(estimator: MemoryEstimator, state: object, hook: Callable[..., Any]) -> nn.Module:
    """Train two layers of 1 MiB for two steps; in the second step each has its own bucket."""
    with torch.device(estimator.device):
        model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(2)))
        wrapped = DistributedDataParallel(model, bucket_cap_mb=1)
        wrapped.register_comm_hook(state, hook)
        for _ in range(2):
            wrapped.zero_grad()
            step(wrapped, 1, 512)
    return wrapped


def test_a_hook_in_bfloat16_takes_half_of_each_bucket_on_a_gpu() -> None:
    """The first step has one bucket of 2 MiB, the second two of 1 MiB. torch refuses the hook on the CPU."""
    found = estimate_ranks(lambda estimator, _: with_hook(estimator, None, bf16_compress_hook), 4, [0])
    blocks, operators = found.of(0).trace.allocations, found.of(0).trace.operators
    made = [
        int(blocks.bytes[row])
        for row in range(len(blocks))
        if operators[blocks.operator[row]] == "aten::_to_copy"
    ]
    assert made == [MIB, MIB // 2, MIB // 2]


def test_power_sgd_keeps_an_error_and_two_thin_matrices_for_each_bucket() -> None:
    """For 512 x 512 and rank 4, matrices have 512 x 4 floats (8 KiB); the error is as large as the bucket."""
    state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2, min_compression_rate=1)

    def build(estimator: MemoryEstimator, mesh: DeviceMesh) -> object:
        model = nn.Linear(512, 512, bias=False)
        wrapped = DistributedDataParallel(model, bucket_cap_mb=1)
        wrapped.register_comm_hook(state, powerSGD_hook)
        for _ in range(4):
            wrapped.zero_grad()
            step(wrapped, 1, 512)
        return wrapped

    (one,) = on_cpu(build, 2, 0).ranks
    assert alive(one) == 3 * MIB + MIB + 2 * 8 * KIB  # parameter, gradient, bucket; error; two matrices


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batched_grad_copy": True}, "batched_grad_copy"),
        ({"mixed_precision": _MixedPrecision(param_dtype=torch.float16)}, "mixed_precision"),
    ],
)
def test_what_ddp_cannot_be_estimated_with_is_refused_by_name(options: dict[str, Any], said: str) -> None:
    with pytest.raises(MemPluginError, match=said):
        on_cpu(data_parallel(**options), 2)


def test_sparse_gradients_of_ddp_are_refused_by_name() -> None:
    with pytest.raises(MemPluginError, match="sparse gradients"):
        on_cpu(lambda *_: DistributedDataParallel(nn.Embedding(8, 8, sparse=True)), 2)


def test_the_worst_rank_is_named_and_every_rank_is_saved(tmp_path: Path) -> None:
    """The layer of the second rank is twice as large."""

    def build(estimator: MemoryEstimator, mesh: DeviceMesh) -> nn.Module:
        return nn.Linear(256, 256 * (1 + dist.get_rank()), bias=False)

    found = on_cpu(build, 2)
    assert found.worst.rank == 1
    assert found.of(0).estimate.peak_allocated_bytes == 256 * KIB
    assert found.worst.estimate.peak_allocated_bytes == 512 * KIB
    with pytest.raises(MemPluginError, match="Rank 2 was not estimated"):
        found.of(2)
    found.save(tmp_path)
    assert len(list(tmp_path.rglob("*estimate_rank*"))) >= 2


def test_ranks_of_a_gpu_have_a_reserve() -> None:
    def build(estimator: MemoryEstimator, mesh: DeviceMesh) -> nn.Module:
        model = sharded(nn.Linear(1024, 1024, bias=False).cuda(), mesh)
        model(estimator.create_fake_tensor(1, 1024)).sum().backward()
        return model

    (one,) = estimate_ranks(build, 8, [3], gpu="a100").ranks
    assert one.estimate.fits
    assert sizes(one, "parameter") == [512 * KIB]
    assert one.estimate.peak_reserved_bytes >= one.estimate.peak_allocated_bytes


def replaceable() -> tuple[object, ...]:
    names = ("Reducer", "Logger", "new_group", "init_process_group", "all_reduce")
    return (sys.excepthook, torch.UntypedStorage.resize_, *(getattr(dist, name) for name in names))


def test_nothing_is_left_of_a_world_that_was_estimated() -> None:
    before = replaceable()
    with pytest.raises(ZeroDivisionError):
        on_cpu(lambda *_: 1 // 0, 2)
    assert before == replaceable()
    assert not dist.is_initialized()


def test_a_process_that_is_a_rank_already_is_told_so() -> None:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(MemPluginError, match="already rank 0 of a process group"):
            on_cpu(lambda *_: None, 2)
    finally:
        dist.destroy_process_group()


def test_ranks_outside_of_the_mesh_are_refused() -> None:
    with pytest.raises(MemPluginError, match=r"not in the mesh dp=2: \[2\]"):
        on_cpu(lambda *_: None, 2, 2)


def test_a_mesh_is_read_and_counts_its_last_dimension_fastest() -> None:
    mesh = parse_mesh("dp=8, tp=2")
    assert (mesh.names, mesh.shape, mesh.world_size) == (("dp", "tp"), (8, 2), 16)
    assert (mesh.size("tp"), mesh.size("pp"), str(mesh)) == (2, 1, "dp=8,tp=2")
    assert mesh.coordinate(5) == (2, 1)
    assert mesh.corners == (0, 1, 14, 15)


@pytest.mark.parametrize("text", ["", "dp", "dp=0", "dp=2,dp=2", "dp=-1", "2", "dp=9999999,tp=9999999"])
def test_a_mesh_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(MemPluginError, match="mesh"):
        parse_mesh(text)
