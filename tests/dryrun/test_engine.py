"""Tests of `tb-memplugin estimate --engine runtime`: programs run on PyTorch's own CUDA code without a GPU.

Those that run a program need PyTorch's CUDA build (docs/gpu.md), and are skipped on others.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tb_memplugin import MemPluginError
from tb_memplugin.commands import main
from tb_memplugin.dryrun.build import StandIn, stand_in
from tb_memplugin.dryrun.engine import environment, estimate_program
from tb_memplugin.estimate.answer.script import read_program
from tb_memplugin.estimate.answer.step_estimate import StepEstimate
from tb_memplugin.estimate.gpu_spec import GpuSpec
from tb_memplugin.estimate.kernels.recurrent import SIZED
from tests.cli import CliRunner
from tests.estimate.test_programs import ENDS, PEAKS, PROGRAMS, TRAINING

needs_cuda_build = pytest.mark.skipif(torch.version.cuda is None, reason="needs PyTorch's CUDA build")
MIB = 1 << 20


def dry_run(folder: Path, text: str, *arguments: str, **options) -> StepEstimate:
    script = folder / "train.py"
    script.write_text(text, "utf-8")
    gpu = GpuSpec.named(options.pop("gpu", "h100"))
    return estimate_program(read_program([str(script), *arguments]), gpu, **options)


@needs_cuda_build
@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="counted with PyTorch 2.13")
@pytest.mark.parametrize("name", PEAKS)
def test_a_report_equals_the_allocators_counters(name: str) -> None:
    if name == "language_model":
        pytest.importorskip("transformers")
    step = estimate_program(
        read_program(["python", str(PROGRAMS / f"{name}.py")]), GpuSpec.named("h100"), steps=1000
    )
    assert step.notes[0] == "The program ran to its end."
    assert (step.estimate.peak_allocated_bytes, step.estimate.peak_reserved_bytes) == PEAKS[name]
    assert sum(size for _, size in step.estimate.breakdown) == PEAKS[name][0]


@needs_cuda_build
def test_a_training_runs_until_its_optimizer_has_stepped_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    step = dry_run(tmp_path, TRAINING, "--width", "1024")
    # Weights, gradients and two states of 4 MiB; AdamW's foreach step takes one more of them.
    assert 20 * MIB <= step.estimate.peak_allocated_bytes - step.estimate.workspace_bytes <= 21 * MIB
    assert step.notes[0] == "The program was ended after 3 optimizer steps."
    assert not (tmp_path / "best.pt").exists()


@needs_cuda_build
@pytest.mark.parametrize("end", ENDS)
def test_a_program_that_ends_in_its_own_way_is_reported(tmp_path: Path, end: str) -> None:
    text, why = ENDS[end]
    step = dry_run(tmp_path, text, limit_s=1 if "seconds" in why else 60)
    assert why in step.notes[0]
    assert step.estimate.peak_allocated_bytes >= 4 * MIB


BACKWARD = """
import torch
w = torch.nn.Parameter(torch.randn(1024, 1024, device="cuda"))
(w.cumprod(1).sum() + w.prod(1).sum() + w.prod()).backward()
y = w * 2
z = y[y > 0]
print("SELECTED", len(z), flush=True)
with torch.autograd.detect_anomaly(check_nan=True):
    z.sum().backward()
"""


@needs_cuda_build
def test_backward_knows_what_forward_selected_and_finds_no_zero(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    step = dry_run(tmp_path, BACKWARD, hints={"train.py:6": 0.5})
    assert step.notes[0] == "The program ran to its end."
    assert f"SELECTED {1 << 19}" in capfd.readouterr().err


@needs_cuda_build
def test_recurrent_layers_of_any_size_take_what_the_rule_says(tmp_path: Path) -> None:
    text = "import torch\ntorch.nn.GRU(77, 33).cuda()(torch.ones(5, 3, 77).cuda())"
    assert SIZED in dry_run(tmp_path, text).notes


SPAWNS = """
import torch, torch.distributed as dist, torch.multiprocessing as mp

def train(rank, ranks):
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29517", rank=rank, world_size=ranks)
    torch.cuda.set_device(rank)
    torch.ones((16 << 20) * (rank + 1), dtype=torch.uint8, device="cuda")

if __name__ == "__main__":
    mp.spawn(train, args=(2,), nprocs=2)
"""


@needs_cuda_build
def test_processes_that_a_program_spawns_are_ranks(tmp_path: Path) -> None:
    step = dry_run(tmp_path, SPAWNS)
    assert step.notes[0] == "Rank 1 reserves the most of 2 ranks."
    assert step.estimate.peak_allocated_bytes == 32 * MIB


RANKS = """
import os, torch, torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
model = nn.parallel.DistributedDataParallel(nn.Linear(1024, 1024).cuda(), device_ids=[rank])
optimizer = torch.optim.SGD(model.parameters())
objects = [None] * dist.get_world_size()
dist.all_gather_object(objects, {"rank": rank, "text": "y" * 100_000})
print("GATHERED", [(each["rank"], len(each["text"])) for each in objects], flush=True)
while True:
    model(torch.randn(1024 + 8192 * rank, 1024, device="cuda")).sum().backward()
    optimizer.step()
"""


@needs_cuda_build
def test_ranks_run_at_once_and_exchange_objects(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(RANKS, "utf-8")
    words = ["torchrun", "--nproc-per-node", "2", str(script)]
    step = estimate_program(read_program(words), GpuSpec.named("h100"))
    assert step.notes[:2] == (
        "Rank 1 reserves the most of 2 ranks.",
        "The program was ended after 3 optimizer steps.",
    )
    assert step.estimate.peak_allocated_bytes >= 2 * 9216 * 1024 * 4  # its larger batch, and the output
    assert capfd.readouterr().err.count("GATHERED [(0, 100000), (1, 100000)]") == 2


@needs_cuda_build
def test_a_step_larger_than_the_gpu_tells_its_need(tmp_path: Path) -> None:
    text = "import torch\nx = torch.empty(20 << 30, dtype=torch.uint8, device='cuda')"
    step = dry_run(tmp_path, text, gpu="t4")
    assert step.estimate.peak_allocated_bytes == 20 << 30
    assert step.estimate.fits is False
    assert step.estimate.margin_bytes == GpuSpec.named("t4").usable_bytes - (20 << 30)


@needs_cuda_build
@pytest.mark.parametrize("name", GpuSpec.names())
def test_a_program_sees_the_gpu_of_the_table(name: str) -> None:
    gpu = GpuSpec.named(name)
    code = "import torch\np = torch.cuda.get_device_properties(0)\n" + (
        "print(p.name, p.major, p.minor, p.multi_processor_count, p.total_memory, sep=';')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(stand_in(), gpu, Path("/nonexistent")),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    numbers = (*gpu.compute_capability, gpu.processors, gpu.memory_bytes)
    assert done.stdout.strip() == ";".join([gpu.driver_name, *map(str, numbers)])


@needs_cuda_build
def test_the_stand_in_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built = stand_in()
    monkeypatch.setenv("PATH", "")  # no compiler any more
    assert stand_in() == built


@needs_cuda_build
def test_a_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TB_MEMPLUGIN_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MemPluginError, match=r"gcc, g\+\+, nm is not installed") as caught:
        stand_in()
    assert "--engine fake" in (caught.value.fix or "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.version.cuda is not None, reason="needs PyTorch's CPU build")
def test_a_build_without_cuda_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MemPluginError, match="is not a build with CUDA") as caught:
        dry_run(tmp_path, "")
    assert "--engine fake" in (caught.value.fix or "")


def test_an_unknown_gpu_is_refused() -> None:
    words = ["estimate", "--gpu", "a1000", "--engine", "runtime", "--", "python", __file__]
    result = CliRunner().invoke(main, words)
    assert result.exit_code != 0
    assert "'a1000' is not the name of a GPU" in result.output


def test_a_gpu_is_described_by_the_numbers_of_the_table(tmp_path: Path) -> None:
    built = StandIn(tmp_path / "standin.so", tmp_path / "lib")
    variables = environment(built, GpuSpec.named("a100-40gb"), tmp_path, devices=2)
    described = f"8 0 108 2048 32 {163 << 10} {40_448 * MIB} NVIDIA A100-SXM4-40GB"
    assert (variables["STANDIN_DEVICE"], variables["STANDIN_DEVICES"]) == (described, "2")
