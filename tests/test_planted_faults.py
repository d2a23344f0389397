"""Advice finds the fault planted in a small training, and its bytes, and nothing in the same without it.

The truth is another run: the peak with the fault minus the peak without it. tests/gpu/test_planted_faults.py
does the same with snapshots, by the allocator's own counter.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import profile, schedule

from tb_memplugin import load, memory_trace_handler
from tb_memplugin.analysis import Finding, advice
from tb_memplugin.trace import Category, MemoryTrace
from tests.planted_faults import ALLOWED, KINDS, PER_STEP, PROGRAMS, Program, run


def record(program: Program, folder: Path) -> MemoryTrace:
    gc.collect()
    handler = memory_trace_handler(folder, model=program.model, optimizer=program.optimizer)
    steps = schedule(skip_first=program.warm_up, wait=0, warmup=1, active=program.steps, repeat=1)
    with profile(profile_memory=True, schedule=steps, on_trace_ready=handler) as profiler:
        run(program, lambda: None, after_step=profiler.step, extra=1)
    return load(str(next(folder.rglob("*.mem"))))


def findings(trace: MemoryTrace) -> dict[str, Finding]:
    return {finding.kind: finding for finding in advice(trace, "cpu").findings}


def peak(trace: MemoryTrace) -> int:
    return int(trace.live(trace.device_row("cpu")).max())


NEEDS_STACKS = {
    "previous_result",
    "teacher_graph",
    "retained_graph",
    "float64_model",
    "replaced_optimizer",
    "one_checkpoint",
    "kept_caches",
    "hidden_states",
    "merged_weights",
    "reordered_caches",
    "earlier_folds",
    "evaluation_graph",
    "similarities",
    "dequantised_weights",
    "reference_graph",
}


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in NEEDS_STACKS])
def test_a_planted_fault_is_found_and_its_bytes_are_right(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    broken = record(PROGRAMS[name]("cpu", True), tmp_path / "broken")
    fixed = record(PROGRAMS[name]("cpu", False), tmp_path / "fixed")
    truth = PER_STEP.get(name) or peak(broken) - peak(fixed)
    found = findings(broken)[KINDS.get(name, name)]
    assert found.bytes == pytest.approx(truth, rel=ALLOWED)
    assert KINDS.get(name, name) not in findings(fixed)
    problems = [one for one in findings(fixed).values() if one.level == "problem"]
    assert [one.kind for one in problems if one.bytes > 0.01 * peak(fixed)] == []


def test_gradients_of_one_model_that_stay_while_those_of_another_are_freed_are_no_fault(
    tmp_path: Path,
) -> None:
    """One round of two models that train in turns: the critic's gradients stay until its next step."""
    generator, critic = (nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(2))
    of_generator, of_critic = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, critic))

    def step() -> None:
        of_critic.zero_grad()
        with torch.no_grad():
            made = generator(torch.rand(64, 64))
        critic(made).square().mean().backward()
        of_critic.step()
        of_generator.zero_grad()
        critic(generator(torch.rand(64, 64))).square().mean().backward()
        of_generator.step()

    trace = record(Program(step), tmp_path)
    assert (trace.allocations.category == Category.GRADIENT).sum() >= 8
    assert "unused_gradients" not in findings(trace)
