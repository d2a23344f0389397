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


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_script_is_made_as_without_us_and_the_hooks_of_both_stay(watching):
    model, told = nn.Sequential(nn.Linear(4, 3)), []
    x = torch.ones(2, 4)
    with watching(model):
        before = [list(one._forward_pre_hooks) + list(one._forward_hooks) for one in model.modules()]
        script = torch.jit.script(model)
        assert torch.equal(script(x), model(x))
        assert torch.equal(torch.jit.trace(model, x)(x), model(x))
        handle = model.register_forward_hook(lambda *_: told.append("the user's"))
        model(x)
        handle.remove()
        assert [list(one._forward_pre_hooks) + list(one._forward_hooks) for one in model.modules()] == before
    assert told == ["the user's"]


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_script_that_is_the_model_is_reported():
    model: torch.nn.Module = torch.jit.script(nn.Linear(4, 3))
    with reported(model, None) as report:
        model(torch.ones(2, 4)).sum().backward()
        memory = report.record_stats()
    assert memory is not None
    assert (memory.weight_bytes, memory.gradient_bytes) == (60, 60)
