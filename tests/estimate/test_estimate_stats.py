"""Tests for memory by module, phase and operator, and for the printed report."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.utils.checkpoint import checkpoint

from tb_memplugin import MemoryEstimator
from tb_memplugin.trace import Category
from tests.estimate.fake_runs import KIB, MIB, allocations, estimated

WORKSPACE = 8_519_680


@pytest.fixture(scope="module")
def inference() -> MemoryEstimator:
    """Run two layers of 4 MiB on 1024 rows of 1024 float32; results have 4 MiB, and the first is freed."""
    with MemoryEstimator(gpu="a100") as estimator:
        model = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 1024, bias=False)).cuda()
        batch = estimator.create_fake_tensor(1024, 1024)
        with torch.no_grad(), estimator.track_phase("[bold]inference"):
            result = model(batch)
    assert result.shape == (1024, 1024)
    return estimator


def test_modules_include_what_is_inside_them(inference: MemoryEstimator) -> None:
    found = {one.name: one for one in inference.get_module_stats()}
    assert found["0"].allocated_bytes == found["1"].allocated_bytes == 8 * MIB  # weight and result
    assert found["(root)"].allocated_bytes == 16 * MIB
    assert found["(root)"].allocations == 4
    assert found["(root)"].class_name == "Sequential"
    assert found["(root)"].at_peak_bytes == 16 * MIB


def test_a_modules_peak_is_the_devices_while_it_runs(inference: MemoryEstimator) -> None:
    found = {one.name: one.peak_bytes for one in inference.get_module_stats()}
    base = 2 * 4 * MIB + 4 * MIB + WORKSPACE
    assert found["1"] == pytest.approx(base + 2 * 4 * MIB, abs=MIB)
    assert found["0"] == pytest.approx(base + 4 * MIB, abs=MIB)
    assert found["(root)"] == found["1"]


def test_phases_have_a_before_an_after_and_a_peak(inference: MemoryEstimator) -> None:
    (phase,) = inference.get_phase_stats()
    before = 2 * 4 * MIB + 4 * MIB
    assert (phase.before_bytes, phase.after_bytes) == (before, before + 4 * MIB + WORKSPACE)
    assert phase.peak_bytes == before + 2 * 4 * MIB + WORKSPACE


def test_operators_are_counted(inference: MemoryEstimator) -> None:
    found = {one.operator: one for one in inference.get_tensor_stats()}
    assert found["aten::_to_copy"].count == 2
    assert found["aten::_to_copy"].bytes == 8 * MIB
    assert found["aten::mm"].count == 3  # two results, one workspace
    assert found["aten::mm"].largest_bytes >= WORKSPACE


def test_the_report_names_what_counts(inference: MemoryEstimator) -> None:
    text = io.StringIO()
    inference.print_memory_stats(detailed=True, console=Console(file=text, width=140))
    told = text.getvalue()
    assert "Peak allocated" in told
    assert "On a100-80gb it fits" in told
    assert "[bold]inference" in told  # names are not markup
    assert "aten::mm" in told
    assert "Sequential" in told


def test_what_never_ran_as_a_module_has_no_peak_while_it_ran() -> None:
    text = io.StringIO()
    with MemoryEstimator(gpu="a100") as estimator:
        kept = estimator.create_fake_tensor(MIB // 4)
    estimator.print_memory_stats(detailed=True, console=Console(file=text, width=140))
    (row,) = [line for line in text.getvalue().splitlines() if "outside" in line]
    assert [cell.strip() for cell in row.split("│")[3:6]] == ["1,048,576", "", "1,048,576"]
    del kept


def test_checkpointed_activations_are_computed_anew() -> None:
    def run() -> None:
        layer = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.ReLU()).cuda()
        batch = torch.randn(1024, 1024, device="cuda", requires_grad=True)
        checkpoint(layer, batch, use_reentrant=False).sum().backward()

    done = estimated(run, gpu="a100")
    recomputed = [size for _, size, kind in allocations(done) if kind == Category.RECOMPUTED.key]
    assert recomputed[:1] == [4 * MIB]


def test_an_error_inside_the_block_is_the_programs_and_leaves_nothing_behind() -> None:
    estimator = MemoryEstimator()

    def run() -> None:
        with estimator:
            nn.Linear(8, 8).cuda()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run()
    assert estimator.get_max_memory_allocated()[0] > 0
    assert type(torch.ones(1)) is torch.Tensor
    assert not torch.nn.modules.module._global_forward_pre_hooks
    assert torch.autograd.is_multithreading_enabled()


def test_compute_and_memory_on_two_devices_are_told_apart() -> None:
    with MemoryEstimator() as estimator:
        first = torch.empty(MIB, device="cuda:0")
        second = torch.empty(2 * MIB, device="cuda:1")
    assert first.device != second.device
    assert estimator.get_max_memory_allocated() == (4 * MIB, 8 * MIB)
    assert [device.name for device in estimator.trace_result().devices] == ["cuda:0", "cuda:1"]


def test_an_estimate_is_of_the_gpu_that_needs_the_most() -> None:
    """A pipeline by hand: 4 KiB of weights on the first GPU, 4 MiB on the second; gradients, too."""

    def run() -> nn.Module:
        first = nn.Linear(32, 32, bias=False, device="cuda:0")
        second = nn.Linear(32, 32 * KIB, bias=False, device="cuda:1")
        second(first(torch.ones(1, 32, device="cuda:0")).to("cuda:1")).sum().backward()
        return nn.Sequential(first, second)

    answer = estimated(run).estimate()
    parts = dict(answer.breakdown)
    assert (parts["parameter"], parts["gradient"]) == (4 * MIB, 4 * MIB)
    assert any("of cuda:1, which needs the most" in note for note in answer.notes)
