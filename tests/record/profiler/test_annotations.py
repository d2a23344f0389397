"""Tests for the named ranges of a profile, beside those in the Kineto trace of the same profile."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.profiler import profile, record_function, schedule

from tb_memplugin import load, memory_trace_handler
from tb_memplugin.analysis import stages

KEYS = [
    "ProfilerStep#1_START",
    "load_START",
    "load_END",
    "loss_START",
    "inner_START",
    "inner_END",
    "loss_END",
    "Optimizer.step#SGD.step_START",
    "Optimizer.step#SGD.step_END",
    "ProfilerStep#1_END",
]


def train(prof: profile, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(2):
        with record_function("load"):
            x = torch.ones(10, 100)
        with record_function("loss"):
            loss = model(x).sum()
            with record_function("inner"):
                pass
        loss.backward()
        optimizer.step()
        del x, loss
        prof.step()


@pytest.mark.parametrize("with_stack", [False, True])
def test_annotations_are_those_of_the_kineto_trace(tmp_path, with_stack):
    """The batch has 4,000 bytes. A Kineto trace does not contain what was there before, always as much."""
    model = nn.Linear(100, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handler = memory_trace_handler(tmp_path / "run", model=model, optimizer=optimizer)
    plan = schedule(wait=0, warmup=1, active=1, repeat=1)
    with profile(profile_memory=True, with_stack=with_stack, schedule=plan, on_trace_ready=handler) as prof:
        train(prof, model, optimizer)
    prof.export_chrome_trace(str(tmp_path / "trace.json"))
    (window,) = (tmp_path / "run").rglob("window-*.mem")
    ours, theirs = stages(load(window)), stages(load(tmp_path / "trace.json"))
    assert [stage.key for stage in ours] == [stage.key for stage in theirs] == KEYS
    live = {stage.key: stage.bytes for stage in ours}
    assert live["load_END"] - live["load_START"] == 4000
    assert len({one.bytes - other.bytes for one, other in zip(ours, theirs, strict=True)}) == 1
