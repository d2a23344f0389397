"""Tests of `tb-memplugin estimate -- python train.py`: programs run unchanged on fake tensors."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tb_memplugin import MemPluginError
from tb_memplugin.estimate.answer.script import Program, read_program
from tb_memplugin.estimate.answer.step_estimate import StepEstimate, estimate_program
from tb_memplugin.estimate.gpu_spec import GpuSpec
from tb_memplugin.read.cublas import keeps_workspaces

MIB = 1 << 20

PROGRAMS = Path(__file__).parent / "programs"

PEAKS = {
    "classifier": (110_090_240, 136_314_880),
    "gan": (85_929_472, 96_468_992),
    "dqn": (67_295_232, 69_206_016),
    "cuda_graph": (143_664_640, 180_355_072),
    "memory_calls": (237_060_096, 283_115_520),
    "language_model": (254_991_360, 283_115_520),
}
"""Bytes at the peak, allocated and reserved, of PyTorch 2.13's allocator as on an H100.

Counted by `python -m tests.gpu.standin -m tests.estimate.programs.counted NAME`.
"""

TRAINING = """
import argparse, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int)
    width = parser.parse_args().width
    data = TensorDataset(torch.randn(64, width), torch.randint(0, 2, (64,)))
    model = nn.Linear(width, width, bias=False).to("cuda" if torch.cuda.is_available() else "cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    best = 0.0
    for epoch in range(1_000_000):
        correct = 0
        for batch, labels in DataLoader(data, batch_size=16, shuffle=True):
            output = model(batch.cuda())
            loss = nn.functional.cross_entropy(output, labels.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            correct += (output.argmax(1) == labels.cuda()).sum().item()
            print(f"loss {loss.item():.3f}, {torch.cuda.memory_reserved()} bytes reserved")
            if correct / 64 > best:
                best = correct / 64
                torch.save(model.state_dict(), "best.pt")
"""


def estimated(folder: Path, text: str, *arguments: str, limit_s: int = 60) -> StepEstimate:
    script = folder / "train.py"
    script.write_text(text, "utf-8")
    return estimate_program(read_program([str(script), *arguments]), GpuSpec.named("h100"), limit_s=limit_s)


STEP = """
import torch

weight = torch.ones(1 << 20, device="cuda", requires_grad=True)
optimizer = torch.optim.SGD([weight], momentum=0.9, foreach=False)
weight.sum().backward()
optimizer.step()
"""


def test_the_last_step_of_an_optimizer_has_its_phase(tmp_path: Path) -> None:
    """The weight, its gradient and the momentum, which the step allocates, have 4 MiB each."""
    (tmp_path / "step.py").write_text(STEP, "utf-8")
    program = read_program(["python", str(tmp_path / "step.py")])
    step = estimate_program(program, GpuSpec.named("h100"), steps=1)
    assert dict(step.estimate.phases)["optimizer"] == 12 * MIB


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13.") or not keeps_workspaces(), reason="counted with PyTorch 2.13"
)
@pytest.mark.parametrize("collector", [True, False], ids=["", "without the collector of cycles"])
@pytest.mark.parametrize("name", PEAKS)
def test_a_programs_estimate_equals_the_allocators_counters(
    name: str, collector: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "language_model":
        pytest.importorskip("transformers")
    program = read_program(["python", str(PROGRAMS / f"{name}.py")])
    if not collector:
        gc.disable()
    try:
        step = estimate_program(program, GpuSpec.named("h100"), steps=1000)
    finally:
        gc.enable()
    assert step.notes[0] == "The program ran to its end."
    assert (step.estimate.peak_allocated_bytes, step.estimate.peak_reserved_bytes) == PEAKS[name]


def test_a_training_runs_until_its_optimizer_has_stepped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    step = estimated(tmp_path, TRAINING, "--width", "1024")
    # Weights, gradients and two states of 4 MiB; AdamW's foreach step takes one more of them.
    assert 20 * MIB <= step.estimate.peak_allocated_bytes - step.estimate.workspace_bytes <= 21 * MIB
    assert step.notes[0] == "The program was ended after 3 optimizer steps."
    assert any("torch.save wrote nothing" in note for note in step.notes)
    assert not (tmp_path / "best.pt").exists()
    assert capsys.readouterr().out.count("bytes reserved") == 2  # the third step ends it


FOLDS = """
import torch
def fold():
    model = torch.nn.Linear(1024, 1024, bias=False).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 1024, device="cuda")).sum().backward()
    optimizer.step()
fold()
print(torch.cuda.memory_allocated(), "bytes left")
"""


def test_an_optimizer_that_the_program_is_done_with_is_freed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = estimated(tmp_path, FOLDS)
    assert capsys.readouterr().out == f"{step.estimate.workspace_bytes} bytes left\n"


ENDS = {
    "runs to its end": (
        "import torch\nx = torch.zeros(1 << 20, device='cuda')",
        "The program ran to its end.",
    ),
    "exits": ("import sys, torch\nx = torch.zeros(1 << 20, device='cuda')\nsys.exit(0)", "ran to its end"),
    "exits at once": ("import os, torch\nx = torch.zeros(1 << 20, device='cuda')\nos._exit(1)", "ran to"),
    "catches everything": (
        "import torch\nx = torch.nn.Linear(512, 2048, bias=False).cuda()\n"
        "o = torch.optim.SGD(x.parameters())\n"
        "while True:\n  try:\n    x(torch.ones(1, 512).cuda()).sum().backward(); o.step()\n"
        "  except Exception:\n    pass",
        "after 3 optimizer steps",
    ),
    "catches even what ends it": (
        "import torch\nx = torch.nn.Linear(512, 2048, bias=False).cuda()\n"
        "o = torch.optim.SGD(x.parameters())\n"
        "while True:\n  try:\n    x(torch.ones(1, 512).cuda()).sum().backward(); o.step()\n"
        "  except:\n    print('skipped')",
        "after 3 optimizer steps",
    ),
    "has an alarm of its own": (
        "import signal, torch\nx = torch.zeros(1 << 20, device='cuda')\n"
        "signal.signal(signal.SIGALRM, lambda *_: None)\n"
        "while True: signal.alarm(9); signal.alarm(0)",
        "after 1 seconds",
    ),
    "changes to a folder that it removes": (
        "import os, tempfile, torch\nx = torch.zeros(1 << 20, device='cuda')\n"
        "os.chdir(tempfile.mkdtemp())\nos.rmdir(os.getcwd())",
        "ran to its end",
    ),
    "is interrupted": (
        "import torch\nx = torch.zeros(1 << 20, device='cuda')\nraise KeyboardInterrupt",
        "train.py:3",
    ),
    "never steps": (
        "import torch\nx = torch.zeros(1 << 20, device='cuda')\nwhile True: pass",
        "after 1 seconds",
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_program_that_ends_in_another_way_is_estimated_all_the_same(name: str, tmp_path: Path) -> None:
    text, why = ENDS[name]
    before = (sys.argv, list(sys.path), sys.modules["__main__"], Path.cwd())
    step = estimated(tmp_path, text, limit_s=1 if "seconds" in why else 60)
    assert why in step.notes[0]
    assert step.estimate.peak_allocated_bytes >= 4 * MIB
    assert (sys.argv, sys.path, sys.modules["__main__"], Path.cwd()) == before


def test_a_terminated_estimate_removes_what_stands_for_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import time, torch\ntorch.save({}, 'last.pt')\nprint('SAVED', flush=True)\ntime.sleep(300)", "utf-8"
    )
    command = [sys.executable, "-m", "tb_memplugin", "estimate", "--", "python", "train.py"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as started:
        assert started.stderr is not None
        assert any(line == "SAVED\n" for line in started.stderr)
        assert (tmp_path / "last.pt").exists()
        started.terminate()
        assert started.wait(60) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_program_that_cannot_be_ended_is_named_and_its_process_ends(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import time\ndef train():\n  while True:\n    try: time.sleep(60)\n    except: pass\n"
        "while True:\n  try: train()\n  except: pass",
        "utf-8",
    )
    command = [sys.executable, "-m", "tb_memplugin", "estimate", "--limit", "1", "--", "python", str(script)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 2
    assert "error: The program was ended at train.py:" in ran.stderr
    assert f"but it catches that and goes on.\n  where: {script}" in ran.stderr


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("raise ValueError('no data')", "ValueError: no data"),
        ("import sys; sys.exit(3)", "has exited with 3"),
        ("import argparse; argparse.ArgumentParser().parse_args(['-x'])", "has exited with 2"),
        ("def train(:", "SyntaxError"),
        ("import os, sys; os.execl(sys.executable, 'python')", "replaces itself"),
    ],
)
def test_a_program_that_fails_is_named_with_its_line(line: str, what: str, tmp_path: Path) -> None:
    with pytest.raises(MemPluginError, match=what) as failed:
        estimated(tmp_path, f"import torch\n\n{line}")
    assert "train.py:3" in str(failed.value)


def test_a_program_that_fails_is_not_advised_as_a_function_is(tmp_path: Path) -> None:
    with pytest.raises(MemPluginError, match="If it fails without the estimate, too, mend that first"):
        estimated(tmp_path, "open('no_such_file')")


def test_a_line_of_an_installed_library_is_not_the_programs_own(tmp_path: Path) -> None:
    """Wherever it is installed: here as `pip install --target libraries` does."""
    library = tmp_path / "libraries"
    (library / "nothing-1.0.dist-info").mkdir(parents=True)
    (library / "nothing.py").write_text("def leave():\n    raise SystemExit(3)", "utf-8")
    (tmp_path / "train.py").write_text("import nothing\n\nnothing.leave()", "utf-8")
    command = [sys.executable, "-m", "tb_memplugin", "estimate", "--", "python", "train.py"]
    path = os.pathsep.join([str(library), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path}
    ran = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert "where: train.py, at train.py:3" in ran.stderr


def test_a_module_that_does_not_exist_is_named() -> None:
    with pytest.raises(MemPluginError, match="No module named nosuch") as failed:
        estimate_program(read_program(["python", "-m", "nosuch"]), GpuSpec.named("h100"))
    assert "runpy" not in str(failed.value)


def test_torchrun_makes_it_one_rank_of_many(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('nccl')\n"
        "rank = int(os.environ['LOCAL_RANK'])\n"
        "model = torch.nn.Linear(512, 512).cuda(rank)\n"
        "model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank])\n"
        "optimizer = torch.optim.SGD(model.parameters())\n"
        "for _ in range(9):\n"
        "    model(torch.ones(8, 512).cuda(rank)).sum().backward()\n"
        "    optimizer.step()\n"
        "    print(dist.get_rank(), dist.get_world_size(), os.environ['LOCAL_WORLD_SIZE'])\n",
        "utf-8",
    )
    words = ["torchrun", "--nnodes", "2", "--nproc-per-node", "4", str(script)]
    step = estimate_program(read_program(words), GpuSpec.named("h100"))
    assert capsys.readouterr().out == "0 8 4\n0 8 4\n"
    assert step.ranks is not None
    assert step.ranks.mesh.world_size == 8
    assert "communication" in dict(step.estimate.breakdown)  # DDP's buckets


SPAWNS = """
import torch, torch.distributed as dist, torch.multiprocessing as mp


def train(rank, ranks):
    dist.init_process_group("nccl", init_method="tcp://localhost:12355", rank=rank, world_size=ranks)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(512, 512).cuda(rank), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters())
    while True:
        model(torch.ones(8, 512).cuda(rank)).sum().backward()
        optimizer.step()


if __name__ == "__main__":
    START
"""


@pytest.mark.parametrize(
    ("start", "ranks"),
    [
        ("mp.spawn(train, args=(4,), nprocs=4)", 4),
        ("train(0, 2)", 2),
        ("train(0, torch.cuda.device_count())", 1),
    ],
)
def test_a_program_that_makes_itself_a_rank_is_estimated_as_one(
    start: str, ranks: int, tmp_path: Path
) -> None:
    step = estimated(tmp_path, SPAWNS.replace("START", start))
    assert "after 3 optimizer steps" in step.notes[0]
    assert any(f"Of the {ranks} processes" in note for note in step.notes) == ("spawn" in start)
    assert step.ranks is not None
    assert step.ranks.mesh.world_size == ranks
    assert dict(step.estimate.breakdown)["communication"] >= 4 * 512 * 512  # DDP's buckets


def test_a_program_that_is_started_anew_imports_its_own_modules_anew(tmp_path: Path) -> None:
    """Their tensors are those of the rank: 1 MiB of it is in the model's own file."""
    (tmp_path / "rank_mask.py").write_text(
        "import torch\nMASK = torch.ones(512, 512, device='cuda')", "utf-8"
    )
    text = f"import rank_mask\n{SPAWNS.replace('START', 'mp.spawn(train, args=(2,), nprocs=2)')}"
    with_mask = estimated(tmp_path, text).estimate.peak_allocated_bytes
    without = estimated(tmp_path, text.replace("import rank_mask\n", "")).estimate.peak_allocated_bytes
    assert with_mask - without == MIB
    assert "rank_mask" not in sys.modules


def test_torchrun_of_one_process_is_a_rank_too(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SPAWNS.replace("START", "import os; train(int(os.environ['RANK']), 1)"), "utf-8")
    step = estimate_program(
        read_program(["torchrun", "--nproc-per-node=1", str(script)]), GpuSpec.named("h100")
    )
    assert step.ranks is not None
    assert step.ranks.mesh.world_size == 1


WARMS_UP = """
import torch

model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.Adam(model.parameters(), capturable=True)
data, graph, side = torch.ones(8, 64).cuda(), torch.cuda.CUDAGraph(), torch.cuda.Stream()
with torch.cuda.stream(side):
    for _ in range(3):
        model(data).sum().backward()
        optimizer.step()
with torch.cuda.graph(graph):
    kept = torch.zeros(1 << 20, device="cuda")
    model(data).sum().backward()
    optimizer.step()
while True:
    graph.replay()
"""


def test_a_cuda_graph_is_captured_before_the_program_is_ended(tmp_path: Path) -> None:
    """Three steps warm up, one is captured, and the first replay is the fifth."""
    step = estimated(tmp_path, WARMS_UP)
    assert step.notes[0] == "The program was ended after 5 optimizer steps."
    assert step.estimate.peak_allocated_bytes >= 4 * MIB


FORKS = """
import os, sys, time, torch

if not os.fork():
    sys.exit(0)
child = os.fork()
if not child:
    time.sleep(600)
print(child, flush=True)
x = torch.zeros(1 << 20, device="cuda")
"""


def test_processes_of_the_program_end_with_it_and_report_nothing(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(FORKS, "utf-8")
    command = [sys.executable, "-m", "tb_memplugin", "estimate", "--", "python", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.count("peak 4") == 1
    child = int(done.stderr.split()[0])
    while Path(f"/proc/{child}").exists():  # it was asked to end; a test that hangs fails
        time.sleep(0.1)


def test_a_program_that_waits_is_ended_at_its_own_line(tmp_path: Path) -> None:
    step = estimated(tmp_path, "import queue, torch\n\nqueue.Queue().get()", limit_s=1)
    assert "ended at train.py:3, after 1 seconds" in step.notes[0]


def test_command_lines(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    path = str(script)
    assert read_program(["python", "-u", path, "--lr", "1"]) == Program(path, ("--lr", "1"))
    assert read_program([path]) == Program(path, ())
    assert read_program(["python", str(tmp_path)]) == Program(str(tmp_path), ())
    assert read_program(["python3.11", "-m", "package.train", "a"]) == Program("package.train", ("a",), True)
    four = Program(path, ("--x",), ranks=4, ranks_per_node=4)
    assert read_program(["torchrun", "--nproc-per-node=4", path, "--x"]) == four
    module = ["python", "-m", "torch.distributed.run", "--nproc-per-node", "4", path, "--x"]
    assert read_program(module) == four


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["python"],
        ["python", "-c", "1"],
        ["gone.py"],
        ["sh", "train.sh"],
        ["CUDA_VISIBLE_DEVICES=0", "python", __file__],
        ["torchrun", "--nproc-per-node", "gpu", __file__],
        ["torchrun", "--nproc-per-node", "2", "gone.py"],
    ],
)
def test_what_is_no_program_is_refused(words: list[str]) -> None:
    with pytest.raises(MemPluginError, match=r"tb-memplugin estimate -- python train\.py|Give numbers"):
        read_program(words)


def test_the_command_prints_the_report(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\nx = torch.zeros(1 << 20, device='cuda')\nprint('mine')", "utf-8")
    command = [sys.executable, "-m", "tb_memplugin", "estimate"]
    words = ["--", "python", str(script), "--batch", "3"]
    done = subprocess.run([*command, "--json", *words], capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    assert (report["peak_allocated_bytes"], report["peak_reserved_bytes"]) == (4 * MIB, 20 * MIB)
    assert "mine" in done.stderr
    refused = subprocess.run([*command, "--batch", "3", *words], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "--batch" in refused.stderr


TALKING = """
import atexit, multiprocessing, subprocess, sys, threading, torch

threading.Thread(target=threading.Event().wait).start()
atexit.register(print, "AT EXIT")
subprocess.run([sys.executable, "-c", "print('CHILD')"])
print("PROGRAM", torch.zeros(1024, 1024, device="cuda").shape)
print("FOLDER", multiprocessing.current_process()._config.get("tempdir"))
sys.stdout.close()
"""


def test_stdout_has_the_report_alone(tmp_path: Path) -> None:
    """Also where the program prints at its end, or a child of it: JSON is read by other programs.

    A program that closes its streams closes none of ours. A thread of it that nothing ends is not waited for.
    Without processes there is no folder that is left behind by SIGKILL.
    """
    (tmp_path / "train.py").write_text(TALKING, "utf-8")
    command = [sys.executable, "-m", "tb_memplugin", "estimate", "--json", "--", "python", "train.py"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=300)
    assert json.loads(ran.stdout)["peak_allocated_bytes"] == 4 * MIB
    assert {"AT EXIT", "CHILD", "FOLDER None", "PROGRAM torch.Size([1024, 1024])"} <= set(
        ran.stderr.splitlines()
    )


def test_a_crash_names_the_line(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import ctypes\n\nctypes.string_at(8)", "utf-8")
    command = [sys.executable, "-m", "tb_memplugin", "estimate", "--", "python", "train.py"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert ran.returncode == -signal.SIGSEGV
    assert 'File "train.py", line 3' in ran.stderr


GATHERED = """
import os, torch, torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
model = nn.parallel.DistributedDataParallel(nn.SyncBatchNorm(1024, device="cuda"))
optimizer = torch.optim.SGD(model.parameters())
objects = [None] * dist.get_world_size()
dist.all_gather_object(objects, {"loss": 2})
print("GATHERED", sum(each["loss"] for each in objects))
while True:
    model(torch.randn(64, 1024, device="cuda")).sum().backward()
    optimizer.step()
"""


def test_what_ranks_collect_is_assumed_to_be_like_the_ranks_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(GATHERED, "utf-8")
    words = ["torchrun", "--nproc-per-node", "4", str(tmp_path / "train.py")]
    step = estimate_program(read_program(words), GpuSpec.named("h100"))
    assert "GATHERED 8" in capsys.readouterr().out
    assert step.notes[0] == "The program was ended after 3 optimizer steps."
