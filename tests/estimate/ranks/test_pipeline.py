"""Tests for torch.distributed.pipelining on fake tensors: against real processes and sizes found by hand."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from tb_memplugin import MemoryEstimator, MemPluginError
from tb_memplugin.estimate.ranks import RankEstimate, RankEstimates, estimate_ranks
from tests.estimate.ranks.pipelines import INSIDE, ROWS, total, train, train_a_decoder, train_replicas
from tests.estimate.ranks.real_ranks import differences, really, sizes

KINDS = ("GPipe", "1F1B", "interleaved", "zero bubble", "zero bubble V", "dual pipe V")


def estimated(kind: str, stages: int, **options: Any) -> RankEstimates:
    return estimate_ranks(lambda *_: train(kind, **options), f"pp={stages}", device="cpu")


def most_in_flight(one: RankEstimate) -> int:
    """Return the most micro-batches whose saved sigmoid (5 KiB each) is live at the same time."""
    blocks, count = one.trace.allocations, len(one.trace.events)
    operators = np.array(one.trace.operators)[blocks.operator]
    saved = (operators == "aten::sigmoid") & (blocks.bytes == 4 * ROWS * INSIDE)
    change = np.zeros(count + 1, np.int64)
    np.add.at(change, blocks.born[saved], 1)
    np.add.at(change, np.minimum(blocks.freed[saved], count), -1)
    return int(change.cumsum().max())


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("1F1B", [4, 3, 2, 1]),  # P - r
        ("GPipe", [8, 8, 8, 8]),  # all of them
        ("interleaved", [11, 9, 7, 5]),  # 2 (P - 1 - r) + (V - 1) P, plus the one that runs
    ],
)
def test_a_stage_holds_the_micro_batches_that_its_schedule_has_in_flight(
    kind: str, expected: list[int]
) -> None:
    found = estimated(kind, 4, micro_batches=8, told=True)
    assert [one.rank for one in found.ranks] == [0, 1, 2, 3]  # every stage, not the corners
    assert [most_in_flight(one) for one in found.ranks] == expected


def test_pipelines_allocate_what_real_processes_do(tmp_path: Path) -> None:
    """12 pipelines on 3 ranks have the same allocations of at least 512 bytes in order, and the same peak."""
    programs = {
        f"{kind}, told={told}": partial(train, kind, told=told) for kind in KINDS for told in (False, True)
    }
    real = really(programs, 3, tmp_path)
    for kind in KINDS:
        for told in (False, True):
            found = estimated(kind, 3, told=told).ranks
            assert not differences(found, real[f"{kind}, told={told}"])


def test_a_process_group_for_each_pair_of_stages_takes_no_memory() -> None:
    """Two ranks have two stages each; the setting is new in PyTorch 2.15."""
    config: Any = importlib.import_module("torch.distributed.config")
    if not hasattr(config, "pipeline_per_edge_p2p"):
        pytest.skip("This version of PyTorch has one process group for all stages.")
    shared = estimated("interleaved", 2).ranks
    with config.patch(pipeline_per_edge_p2p=True):
        paired = estimated("interleaved", 2).ranks
    assert [sizes(one) for one in paired] == [sizes(one) for one in shared]


def test_stages_of_several_ranks_allocate_what_real_processes_do(tmp_path: Path) -> None:
    """Four ranks with DDP, FSDP2 or tensor parallelism have the same allocations in order, and peaks."""
    pytest.importorskip("transformers.distributed.tensor_parallel")
    ways = [("dp", "1F1B"), ("dp", "zero bubble"), ("fsdp", "1F1B"), ("fsdp", "interleaved")]
    programs = {way: partial(train_replicas, *way) for way in ways}
    divided = partial(train_a_decoder, tensors=2)
    real = really(
        {" ".join(way): program for way, program in programs.items()} | {"tp": divided}, 4, tmp_path
    )
    found = estimate_ranks(lambda *_: divided(), "pp=2,tp=2", range(4), device="cpu").ranks
    assert not differences(found, real["tp"])
    for way, program in programs.items():
        mesh = f"pp=2,{way[0]}=2"
        found = estimate_ranks(lambda *_, run=program: run(), mesh, range(4), device="cpu").ranks
        assert not differences(found, real[" ".join(way)])


def test_a_first_backward_that_torch_stops_at_is_refused_by_name() -> None:
    """GPipe finds out shapes by an extra backward: each gradient is ready twice (reducer.cpp asserts)."""
    with pytest.raises(RuntimeError) as told:
        estimate_ranks(lambda *_: train_replicas("dp", "GPipe"), "pp=2,dp=2", [0], device="cpu")
    assert "produced 8 of 4 gradients" in str(told.value.__cause__)


def widening(estimator: MemoryEstimator, mesh: DeviceMesh) -> object:
    """Run stages that each double the width, so that only the previous stage knows a stage's input shape."""
    rank = mesh.get_rank()
    layer = nn.Linear(64 << rank, 64 << (rank + 1), bias=False)
    stage = PipelineStage(layer, rank, mesh.size(), estimator.device, group=mesh.get_group())
    schedule = Schedule1F1B(stage, 3, loss_fn=total)
    last = torch.ones(24, 64 << mesh.size()) if rank == mesh.size() - 1 else None
    schedule.step(*[torch.ones(24, 64)][: rank == 0], target=last)
    return schedule


def test_stages_learn_shapes_from_stages_that_were_not_asked_for() -> None:
    """The last stage receives 3 micro-batches of 8 rows of 256 floats, in buffers of 8 KiB each."""
    found = estimate_ranks(widening, "pp=3", [2], device="cpu")
    assert [one.rank for one in found.ranks] == [2]
    received = [size for size in sizes(found.of(2), "communication") if size == 8 * 256 * 4]
    assert len(received) == 3


def test_a_pipeline_of_replicas_keeps_its_replicas_apart() -> None:
    """Ranks 0 and 1 have the first stages of two replicas, ranks 2 and 3 their second stages."""

    def build(estimator: MemoryEstimator, mesh: DeviceMesh) -> object:
        width = 64 * (1 + mesh["dp"].get_local_rank())
        stages = mesh["pp"]
        layer = nn.Linear(width, width, bias=False)
        stage = PipelineStage(layer, stages.get_local_rank(), 2, estimator.device, group=stages.get_group())
        schedule = Schedule1F1B(stage, 2, loss_fn=total)
        batch = torch.ones(16, width)
        schedule.step(*[batch][: stage.is_first], target=batch if stage.is_last else None)
        return schedule

    found = estimate_ranks(build, "pp=2,dp=2", device="cpu")
    assert [sizes(one, "parameter") for one in found.ranks] == [[64**2 * 4], [128**2 * 4]] * 2


def test_ranks_that_wait_for_what_nobody_sends_are_told() -> None:
    def build(estimator: MemoryEstimator, mesh: DeviceMesh) -> None:
        dist.recv_object_list([None], src=1 - mesh.get_rank())

    with pytest.raises(MemPluginError, match="never sent: rank 0 for rank 1, rank 1 for rank 0"):
        estimate_ranks(build, 2, device="cpu")


def test_objects_reach_the_rank_that_they_are_for() -> None:
    told: list[str] = []

    def build(estimator: MemoryEstimator, mesh: DeviceMesh) -> None:
        if mesh.get_rank() == 1:
            dist.send_object_list(["first"], dst=0)
            dist.send_object_list(["second"], dst=0)
            return
        for _ in range(2):
            letter: list[str] = [""]
            assert dist.recv_object_list(letter, src=1) == 1
            told.extend(letter)

    estimate_ranks(build, 2, device="cpu")
    assert told == ["first", "second"]
