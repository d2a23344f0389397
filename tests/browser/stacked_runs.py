"""Runs with call stacks of every kind: made, hostile, absent, torch.profiler's own, and the handler's."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

import tb_memplugin
from tb_memplugin.store.writer import RunWriter
from tests.browser.made_stacks import TORCH, stacked_snapshot
from tests.recorded_program import program
from tests.traces import trace

SIDE = "rank0/plugins/tb_memplugin/window-000000.mem"
SCRIPT = "<img src=x onerror=alert(1)><script>alert(2)</script>"


def write_runs(folder: Path) -> None:
    """Write `made`, `names` (attacks), `plain` (no stacks), `twice` (one line, two calls) and `profiled`."""
    RunWriter(str(folder / "made"), "rank0").write(tb_memplugin.load(stacked_snapshot()))
    evil = {
        "script": (f"{SCRIPT} {SCRIPT}.py:1", "main train.py:3"),
        "long": (f"{'f' * 10_000} /work/{'d' * 3_000}/x.py:2", "main train.py:3"),
        "odd": ("\u202eevil\0\n file.py:7", "main train.py:3"),
    }
    lines = (f"alloc {5000 + 100 * row} {name} at={name}" for row, name in enumerate(evil))
    RunWriter(str(folder / "names"), "rank0").write(program(*lines, stacks=evil))
    RunWriter(str(folder / "plain"), "rank0").write(
        trace(
            "start 400 w category=parameter",
            "alloc 2000 a operator=aten::mm",
            "alloc 30 b operator=aten::relu",
        )
    )
    twice = {
        name: (f"{name} {TORCH}/nn/functional.py:{line}", "main train.py:3")
        for name, line in (("linear", 1), ("gelu", 2))
    }
    calls = (f"alloc 100 {name} at={name}" for name in twice)
    RunWriter(str(folder / "twice"), "rank0").write(program(*calls, stacks=twice))
    record_with_stacks(folder / "profiled")


def record_with_stacks(run: Path) -> None:
    """As `export_chrome_trace` writes it, and `tb-memplugin import` reads it."""
    weight = torch.ones(64, 64)
    file = run.parent / "profile.json"
    activities = [ProfilerActivity.CPU]
    with profile(activities=activities, profile_memory=True, with_stack=True) as profiler:
        kept = multiply(weight)
    del kept
    profiler.export_chrome_trace(str(file))
    RunWriter(str(run), "rank0").write(tb_memplugin.load(file))
    file.unlink()


def record_live(run: Path) -> None:
    """A training step under the handler, with the profiler's stacks."""
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=1, repeat=1),
        profile_memory=True,
        with_stack=True,
        on_trace_ready=tb_memplugin.memory_trace_handler(run, "rank0", model=model, optimizer=optimizer),
    ) as profiler:
        for _ in range(2):
            x, y = torch.randn(512, 256), torch.randint(0, 64, (512,))
            optimizer.zero_grad()
            forward_pass(model, x, y).backward()
            optimizer.step()
            profiler.step()


def forward_pass(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(x), y)


def multiply(weight: torch.Tensor) -> torch.Tensor:
    return weight @ weight
