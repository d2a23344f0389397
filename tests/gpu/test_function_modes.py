"""A function mode of the program sees no call of ours on CUDA either, and a scripted model is reported."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.overrides import TorchFunctionMode, resolve_name

from tb_memplugin import IterationReport, LineTracer, MemoryMonitor, MemoryTracer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device, or not run with -m gpu: make gpu"
    ),
]

Recorder = Callable[[nn.Module, Path], AbstractContextManager[object]]

RECORDERS: dict[str, Recorder] = {
    "MemoryTracer": lambda model, _: MemoryTracer().trace(model),
    "LineTracer": lambda *_: LineTracer(),
    "IterationReport": lambda model, _: IterationReport(model, console=Console(file=io.StringIO())),
    "MemoryMonitor": lambda _, folder: MemoryMonitor(folder),
}


class Noted(torch.Tensor):
    """A tensor that notes each look at its device and at what made it."""

    looks: list[str] = []  # noqa: RUF012

    @property
    def grad_fn(self):  # type: ignore[override]
        self.looks.append("grad_fn")
        return super().grad_fn

    @property
    def device(self):  # type: ignore[override]
        self.looks.append("device")
        return super().device


class Calls(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count[resolve_name(function) or str(function)] += 1
        return function(*args, **(kwargs or {}))


def calls(model: nn.Module, folder: Path, recorder: Recorder | None = None) -> Counter[str]:
    """What a mode sees of two steps: of torch, and of the inputs' own attributes."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    Noted.looks.clear()

    def steps() -> None:
        for _ in range(2):
            optimizer.zero_grad()
            inputs = torch.ones(4, 8, device="cuda", requires_grad=True) * 2
            model(inputs.as_subclass(Noted)).sum().backward()
            optimizer.step()

    with Calls() as mode:
        if recorder is None:
            steps()
        else:
            with recorder(model, folder):
                steps()
    return mode.count + Counter(Noted.looks)


@pytest.mark.parametrize("recorder", RECORDERS)
@pytest.mark.parametrize("scripted", [False, True])
def test_a_mode_sees_the_programs_calls_and_no_others(recorder, scripted, tmp_path, caplog):
    model: nn.Module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).cuda()
    if scripted:
        model = torch.jit.script(model)
    calls(model, tmp_path)
    assert calls(model, tmp_path, RECORDERS[recorder]) == calls(model, tmp_path)
    assert "continues without" not in caplog.text
