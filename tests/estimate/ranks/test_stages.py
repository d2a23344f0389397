"""Tests for models divided into pipeline stages, and for the command that does it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tb_memplugin.commands.estimate import command
from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.answer.step_estimate import StepEstimate, StepEstimator
from tb_memplugin.estimate.answer.targets import FunctionTarget
from tb_memplugin.estimate.answer.workload import Workload
from tb_memplugin.estimate.gpu_spec import GpuSpec
from tb_memplugin.estimate.ranks import estimate_ranks
from tb_memplugin.estimate.ranks.pipeline import Pipelining, shares, stage_of
from tests.cli import CliRunner
from tests.estimate.ranks.pipelines import train_a_decoder
from tests.estimate.ranks.real_ranks import differences, really, sizes

WIDTH, LAYERS = 256, 6
WEIGHT = 4 * WIDTH * WIDTH
WORKSPACE = 8519680
"""Bytes of a cuBLAS workspace on an A100; there is one for forward and one for backward."""


def layers_of_one_size(batch: int = 1) -> tuple[nn.Module, torch.Tensor]:
    """Return a model whose layers have 256 KiB each, and its input."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    return model, torch.ones(batch, WIDTH)


def divided(mesh: str, **pipelining: Any) -> StepEstimate:
    target = FunctionTarget("layers", layers_of_one_size)
    workload = Workload(optimizer="sgd")
    return StepEstimator(target, GpuSpec.named("a100"), "", mesh, Pipelining(**pipelining)).step(workload)


def test_layers_are_divided_evenly_the_first_stages_have_more() -> None:
    assert [list(one) for one in shares(5, 3)] == [[0, 1], [2, 3], [4]]
    with pytest.raises(MemPluginError, match="2 layers, which is too few for 3 stages"):
        shares(2, 3)


@pytest.mark.parametrize(
    ("mesh", "schedule", "held"),
    [("pp=4", "1f1b", [2, 2, 1, 1]), ("pp=2", "gpipe", [3, 3]), ("pp=2", "interleaved", [2 + 1, 2 + 1])],
)
def test_each_rank_has_the_parameters_of_its_stages(mesh: str, schedule: str, held: list[int]) -> None:
    """There are six layers; interleaved on two ranks, the stages have 2, 2, 1 and 1 of them."""
    found = divided(mesh, schedule=schedule)
    assert found.ranks is not None
    assert [sizes(one, "parameter") for one in found.ranks.ranks] == [[WEIGHT] * count for count in held]
    assert any("layers divided evenly" in note for note in found.notes)


def test_the_largest_batch_is_one_that_micro_batches_divide() -> None:
    """A sample takes 1 KiB between layers; the GPU has 64 MiB."""
    target, gpu = FunctionTarget("layers", layers_of_one_size), GpuSpec.named("a100")
    gpu = gpu.with_memory((gpu.context_bytes or 0) + (64 << 20))
    estimator = StepEstimator(target, gpu, "", "pp=2", Pipelining(micro_batches=3))
    found = estimator.max_batch(estimator.step(Workload(optimizer="sgd")))
    assert found.batch > 0
    assert all(batch % 3 == 0 for batch, _ in found.needs)
    assert found.batch + 3 in dict(found.needs)


def test_the_whole_model_was_never_there() -> None:
    """Parts of other stages are not counted: a rank of a real job builds only its own layers."""
    found = divided("pp=6")
    assert found.ranks is not None
    for one in found.ranks.ranks:
        assert sizes(one).count(WEIGHT) == 1 + 6 * 2  # a gradient for each of 6 micro-batches in 2 steps
        assert one.estimate.peak_allocated_bytes < 2 * WORKSPACE + 6 * WEIGHT


@pytest.mark.parametrize(
    ("pipelining", "batch", "said"),
    [({"micro_batches": 4}, 6, "6 samples cannot be divided"), ({"micro_batches": 1}, None, "must be")],
)
def test_what_a_schedule_cannot_do_is_refused(
    pipelining: dict[str, Any], batch: int | None, said: str
) -> None:
    target = FunctionTarget("layers", layers_of_one_size)
    estimator = StepEstimator(target, GpuSpec.named("a100"), "", "pp=2", Pipelining(**pipelining))
    with pytest.raises(MemPluginError, match=said):
        estimator.step(Workload(batch=batch))


@pytest.mark.parametrize("pipelining", [{"micro_batches": 4}, {"schedule": "gpipe"}])
def test_what_only_a_pipeline_follows_is_refused_without_one(pipelining: dict[str, Any]) -> None:
    target = FunctionTarget("layers", layers_of_one_size)
    with pytest.raises(MemPluginError, match="are for a pipeline"):
        StepEstimator(target, GpuSpec.named("a100"), "", None, Pipelining(**pipelining)).step(Workload())


def test_a_model_without_a_plan_is_refused_by_name() -> None:
    with pytest.raises(MemPluginError, match="Transformer cannot be divided into stages"):
        stage_of(nn.Transformer(16, 2, 1, 1), 0, 2)


def test_a_decoder_of_transformers_allocates_what_real_processes_do(tmp_path: Path) -> None:
    """Allocations of at least 512 bytes are the same in order, and so is the peak."""
    pytest.importorskip("transformers")
    real = really({"llama": train_a_decoder}, 2, tmp_path)["llama"]
    found = estimate_ranks(lambda *_: train_a_decoder(), "pp=2", device="cpu")
    assert not differences(found.ranks, real)


def test_the_command_divides_a_config_over_stages(tmp_path: Path) -> None:
    """A layer has 4 x 64^2 + 3 x 64 x 128 + 2 x 64 parameters; embedding and head have 512 words each."""
    pytest.importorskip("transformers")
    config = {
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = ["--mesh", "pp=2", "--micro-batches", "4", "--seq", "32", "--no-changes", "--json"]
    ran = CliRunner().invoke(command, [str(tmp_path), *options, "--logdir", str(tmp_path / "runs")])
    assert ran.exit_code == 0, ran.output
    told = json.loads(ran.stdout)
    assert told["workload"]["batch"] == 4
    assert [one["rank"] for one in told["ranks"]] == [0, 1]
    assert told["worst_rank"] in (0, 1)
    assert "Schedule1F1B of torch.distributed.pipelining, 4 micro-batches of 1 sample." in told["notes"][0]
