"""Tests of `tb-memplugin estimate --check`, with fake tensors in place of the second engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tb_memplugin import MemPluginError
from tb_memplugin.commands import main
from tb_memplugin.dryrun import engine as engines
from tb_memplugin.dryrun.engine import Difference, compare_engines
from tb_memplugin.estimate.answer.script import Program, read_program
from tb_memplugin.estimate.answer.step_estimate import StepEstimate, estimate_program
from tb_memplugin.estimate.gpu_spec import GpuSpec
from tb_memplugin.read.cublas import LARGE_WORKSPACE, WORKSPACE, keeps_workspaces
from tests.cli import CliRunner

MIB = 1 << 20
LINEAR_ALGEBRA = Path(__file__).with_name("linear_algebra.py")

PRODUCT = """
import torch
a = torch.zeros(1024, 1024, device="cuda")
b = a @ a
"""


def as_an_a100(program: Program, gpu: GpuSpec, **options: Any) -> StepEstimate:
    """Another engine: the same, but with the workspaces of another GPU."""
    return estimate_program(program, GpuSpec.named("a100-40gb"), **options)


def failing(program: Program, gpu: GpuSpec, **options: Any) -> StepEstimate:
    raise MemPluginError("It does not run here.")


@pytest.fixture
def product(tmp_path: Path) -> str:
    script = tmp_path / "product.py"
    script.write_text(PRODUCT, "utf-8")
    return str(script)


@pytest.mark.skipif(not keeps_workspaces(), reason="PyTorch 2.15 keeps no workspace")
def test_differences_are_named_in_bytes(product: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engines.ENGINES, "runtime", as_an_a100)
    comparison = compare_engines(read_program([product]), GpuSpec.named("h100"))
    # Two matrices of 4 MiB, and the workspace of the product.
    allocated = Difference("peak", "allocated", 8 * MIB + LARGE_WORKSPACE, 8 * MIB + WORKSPACE)
    assert comparison.differences[0] == allocated
    assert {each.kind for each in comparison.differences} == {"peak", "line"}  # it is in no phase
    line = f"{product}:4 (<module>)"  # that of the product
    assert [each for each in comparison.differences if each.kind == "line"] == [
        Difference("line", line, 4 * MIB + LARGE_WORKSPACE, 4 * MIB + WORKSPACE)
    ]


def test_engines_that_agree_have_no_differences(product: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engines.ENGINES, "runtime", estimate_program)
    result = CliRunner().invoke(main, ["estimate", "--check", "--", "python", product])
    assert result.exit_code == 0, result.output
    assert "Both engines agree, to the byte, also in forward, backward and optimizer." in result.output


def test_an_engine_that_cannot_run_it_leaves_the_other_ones_figures(
    product: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(engines.ENGINES, "runtime", failing)
    result = CliRunner().invoke(main, ["estimate", "--check", "--json", "--", "python", product])
    said = json.loads(result.stdout)
    assert said["errors"] == {"runtime": "It does not run here."}
    assert said["fake"]["peak_allocated_bytes"] >= 8 * MIB
    assert "runtime" not in said
    assert said["differences"] == []


def test_a_program_that_no_engine_runs_is_an_error(product: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for engine in engines.ENGINES:
        monkeypatch.setitem(engines.ENGINES, engine, failing)
    with pytest.raises(MemPluginError, match="It does not run here"):
        compare_engines(read_program([product]), GpuSpec.named("h100"))


LINE_SEARCH = """
import torch
weight = torch.ones(512, 512, device="cuda", requires_grad=True)
optimizer = torch.optim.LBFGS([weight], max_iter=6, history_size=4, line_search_fn="strong_wolfe")
def closure():
    optimizer.zero_grad()
    loss = (weight @ weight).square().mean()
    loss.backward()
    return loss
for _ in range(3):
    optimizer.step(closure)
"""


@pytest.mark.skipif(not torch.__version__.startswith("2.13.0+cu"), reason="needs PyTorch 2.13 with CUDA")
def test_a_line_search_ends_at_once_on_both_engines(tmp_path: Path) -> None:
    """So LBFGS makes all its iterations, and its history is full."""
    script = tmp_path / "fit.py"
    script.write_text(LINE_SEARCH, "utf-8")
    fake, runtime = (
        estimate(read_program([str(script)]), GpuSpec.named("h100")).estimate
        for estimate in (engines.ENGINES["fake"], engines.ENGINES["runtime"])
    )
    assert runtime.peak_allocated_bytes == fake.peak_allocated_bytes > 8 * MIB + LARGE_WORKSPACE


@pytest.mark.skipif(not torch.__version__.startswith("2.13.0+cu"), reason="needs PyTorch 2.13 with CUDA")
def test_factorizations_and_solvers_take_what_the_rows_say(capfd: pytest.CaptureFixture[str]) -> None:
    lines = {}
    for name, estimate in engines.ENGINES.items():
        estimate(read_program([str(LINEAR_ALGEBRA)]), GpuSpec.named("h100"))
        captured = capfd.readouterr()
        lines[name] = [
            line for line in (captured.out + captured.err).splitlines() if line.startswith("PEAKS")
        ]
    assert len(lines["runtime"]) == 5 * 18 + 3 + 2 * 6
    assert lines["fake"] == lines["runtime"]
