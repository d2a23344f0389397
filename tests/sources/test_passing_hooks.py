"""A model that is copied or saved while it is watched: the copy is free of us."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.profiler import profile

from tb_memplugin import IterationReport, MemoryTracer, memory_trace_handler


def reported(model, folder):
    return IterationReport(model, console=Console(file=io.StringIO()))


def traced(model, folder):
    return MemoryTracer().trace(model)


def profiled(model, folder):
    handler = memory_trace_handler(folder, model=model)
    return profile(profile_memory=True, on_trace_ready=handler)


@pytest.fixture(params=[reported, traced, profiled])
def watching(request, tmp_path):
    return lambda model: request.param(model, tmp_path)


def test_a_model_can_be_saved_whole_and_loads_without_this_package(watching):
    model, saved = nn.Sequential(nn.Linear(4, 3)), io.BytesIO()
    with watching(model):
        model(torch.ones(2, 4)).sum().backward()
        torch.save(model, saved)
    assert b"tb_memplugin" not in saved.getvalue()
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    assert torch.equal(loaded(torch.ones(2, 4)), model(torch.ones(2, 4)))


def test_a_copy_calls_nobody(watching):
    model = nn.Sequential(nn.Linear(4, 3))
    with watching(model):
        model(torch.ones(2, 4)).sum().backward()
        copied = copy.deepcopy(model)
    for module in copied.modules():
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            assert hook(module, (), None) is None
            assert "tb_memplugin" not in type(hook).__module__
    assert torch.equal(copied(torch.ones(2, 4)), model(torch.ones(2, 4)))
