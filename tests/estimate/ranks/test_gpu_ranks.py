"""Tests for what ranks allocate on a GPU and not on a CPU; tests/gpu/test_ranks.py has real processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tb_memplugin import MemoryEstimator
from tb_memplugin.estimate.program.data_parallel import _BEFORE_2_15
from tb_memplugin.estimate.ranks import RankEstimate, estimate_ranks
from tb_memplugin.trace import Category

KIB = 1 << 10


def on_gpu(program: Callable[[MemoryEstimator, DeviceMesh], object], ranks: int = 2) -> RankEstimate:
    return estimate_ranks(program, ranks, [0], gpu="a100").of(0)


def allocations(one: RankEstimate, text: str) -> list[int]:
    """Return the bytes of each allocation by operators, or with labels, that contain a text."""
    events, trace = one.trace.events, one.trace
    operators, labels = (*trace.operators, ""), (*trace.labels, "")
    born = [row for row in trace.allocations.born if row >= 0]
    return [
        int(events.bytes[row])
        for row in born
        if text in operators[events.operator[row]] or text in labels[events.label[row]]
    ]


def alive(one: RankEstimate) -> list[int]:
    """Return the bytes of what is live at the end, without workspaces of cuBLAS."""
    blocks = one.trace.allocations
    kept = (blocks.freed >= len(one.trace.events)) & (blocks.category != Category.WORKSPACE)
    found: list[int] = blocks.bytes[kept].tolist()
    return found


def sharded(rows: int, columns: int, bias: bool = False, **options: Any) -> RankEstimate:
    """Train a linear layer on two ranks for a step."""

    def program(estimator: MemoryEstimator, mesh: DeviceMesh) -> nn.Module:
        model = nn.Linear(columns, rows, bias=bias, device="cuda")
        fully_shard(model, mesh=mesh, **options)
        model(torch.ones(1, columns, device="cuda")).sum().backward()
        return model

    return on_gpu(program)


def test_copies_of_shards_need_a_number_for_each_two_kilobytes() -> None:
    """A shard of 512 KiB has 256 of them; 5 and 8 more describe the one parameter."""
    one = sharded(512, 512)
    assert allocations(one, "split_with_sizes_copy") == [8 * (256 + 5)]
    assert allocations(one, "chunk_cat") == [8 * (256 + 8)]


def test_a_copy_of_large_shards_gives_each_block_more() -> None:
    """Two shards of 32 MiB would need 32,768 blocks. An A100 gets 3,456: each copies five times."""
    assert allocations(sharded(4096, 4096), "split_with_sizes_copy") == [8 * (-(-16_384 // 5) + 5)]


def test_gradients_are_padded_where_no_kernel_copies_their_dtypes() -> None:
    """513 rows of 512 floats and 513 biases on two ranks become 514."""
    one = sharded(513, 512, bias=True, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
    assert allocations(one, "chunk_cat") == [514 * 512 * 4, 514 * 4]


def test_a_model_on_the_cpu_is_sharded_on_the_gpu() -> None:
    def program(estimator: MemoryEstimator, mesh: DeviceMesh) -> nn.Module:
        model = nn.Linear(256, 256, bias=False, device="cpu")
        fully_shard(model, mesh=mesh)
        assert str(model.weight.device) == "cuda:0"
        return model

    assert alive(on_gpu(program)) == [128 * KIB]


def test_offloaded_shards_are_on_the_gpu_only_while_they_are_gathered() -> None:
    """Nothing of the model is left there: the step ends with shards and gradients on the CPU."""

    def program(estimator: MemoryEstimator, mesh: DeviceMesh) -> nn.Module:
        model = nn.Linear(256, 256, bias=False, device="cpu")
        fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy())
        model(torch.ones(1, 256, device="cuda")).sum().backward()
        assert model.weight.grad is not None
        assert str(model.weight.grad.device) == "cpu"
        return model

    one = on_gpu(program)
    assert 256 * KIB in allocations(one, "")
    assert alive(one) == []


def test_parameters_are_resharded_to_as_many_ranks_as_a_program_names() -> None:
    """512 KiB over four ranks are 128 KiB each, and over two of them 256 KiB between forward and backward."""

    def program(estimator: MemoryEstimator, mesh: DeviceMesh) -> nn.Module:
        model = nn.Sequential(nn.Linear(256, 512, bias=False, device="cuda"))
        fully_shard(model[0], mesh=mesh, reshard_after_forward=2)
        fully_shard(model, mesh=mesh)
        model(torch.ones(1, 256, device="cuda")).sum().backward()
        return model

    assert 256 * KIB in allocations(on_gpu(program, 4), "")


def replicated(hook: Any = None, **options: Any) -> RankEstimate:
    """Train a linear layer of 1 MiB with a bias on two ranks for three steps."""

    def program(estimator: MemoryEstimator, mesh: DeviceMesh) -> nn.Module:
        model = DistributedDataParallel(nn.Linear(256, 1024, device="cuda"), **options)
        if hook is not None:
            model.register_comm_hook(None, hook)
        for _ in range(3):
            model(torch.ones(1, 256, device="cuda")).sum().backward()
            estimator.step()
        return model

    return on_gpu(program)


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, [3 * 4, 1 * 4]),
        ({"find_unused_parameters": True}, [2 * 4]),
        ({"static_graph": True}, [2 * 4, 3 * 4, 1 * 4]),
    ],
)
def test_ddp_tells_other_ranks_numbers(options: dict[str, Any], sizes: list[int]) -> None:
    """In int32: which of two parameters were used; an order of them and its length, the sizes of buckets."""
    assert allocations(replicated(**options), "DDP bookkeeping") == sizes


@pytest.mark.skipif(not _BEFORE_2_15, reason="since PyTorch 2.15, NCCL's group does not keep it")
def test_what_a_hook_sent_is_kept_until_the_groups_next_call_in_another_step() -> None:
    """Half of 257 Ki floats; that of the first step is let go when the order of buckets is sent."""
    one = replicated(fp16_compress_hook)
    blocks = one.trace.allocations
    first, second, third = np.flatnonzero(blocks.bytes == 2 * 257 * KIB)
    assert blocks.freed[first] < blocks.born[second]
    assert blocks.born[third] < blocks.freed[second] < len(one.trace.events)
    assert blocks.freed[third] >= len(one.trace.events)


def test_norms_of_sequence_parallel_layers_allocate_their_share() -> None:
    """Two ranks share 8 tokens of 256 floats: each has 4 (4 KiB), each with a mean and a deviation (4 bytes).

    The backward makes the gradients of 256 weights and biases, and copies the sum's expanded gradient.
    """

    def program(estimator: MemoryEstimator, mesh: DeviceMesh) -> nn.Module:
        norm = parallelize_module(nn.LayerNorm(256, device="cuda"), mesh, SequenceParallel())
        norm(torch.ones(1, 4, 256, device="cuda")).to_local().sum().backward()
        return norm

    one = on_gpu(program)
    backward = allocations(one, "native_layer_norm_backward")
    assert backward == [KIB, KIB, 4 * KIB]
    assert allocations(one, "native_layer_norm") == [4 * KIB, 16, 16, *backward]
