"""Every example of Memory Tracer's page runs here, with the import changed."""

from __future__ import annotations

import re
import sys
import threading
import types
from dataclasses import fields
from pathlib import Path
from textwrap import dedent

import pytest
import torch

from tb_memplugin import MemoryTracer
from tb_memplugin.coming_from import gpu_optimizer
from tb_memplugin.record.memory_tracer import LayerMemoryStats, MemoryEvent
from tests.test_tracer import mlp

PAGE = Path(__file__).parents[2] / "shared" / "seeds" / "memory_tracer.md"


def blocks_of_the_page() -> list[str]:
    """The fenced code, also where a list indents it."""
    text = PAGE.read_text("utf-8") if PAGE.exists() else ""
    return [dedent(code) for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL)]


@pytest.mark.skipif(not PAGE.exists(), reason="the page of Memory Tracer is not on this machine")
@pytest.mark.parametrize("number", range(len(blocks_of_the_page())))
def test_every_example_of_its_forerunners_page_runs(number, tmp_path, monkeypatch, capsys):
    """With the import changed, and a model and its input on the CPU in the places of `...`."""
    code = blocks_of_the_page()[number]
    if code.startswith("@dataclass"):
        ours = {field.name for one in (LayerMemoryStats, MemoryEvent) for field in fields(one)}
        assert set(re.findall(r"^ {4}(\w+):", code, re.MULTILINE)) <= ours
        return
    if code.startswith("MemoryTracer(\n"):
        MemoryTracer(max_events=100000, device="cpu", enable_fragmentation_tracking=True)
        return
    for theirs, here in (
        ("from gpu_optimizer import", "from tb_memplugin import"),
        (".cuda()", ""),
        ("torch.cuda.synchronize()", "pass"),
        ("torch.randn(batch_size, ...)", "torch.randn(batch_size, 64)"),
        ("with self._lock:", "with lock:"),
        ("self.events.append(event)", "events.append(event)"),
    ):
        code = code.replace(theirs, here)
    plots = types.ModuleType("matplotlib.pyplot")
    for name in ("plot", "xlabel", "ylabel", "title", "show"):
        setattr(plots, name, lambda *_: None)
    monkeypatch.setitem(sys.modules, "matplotlib", types.ModuleType("matplotlib"))
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", plots)
    monkeypatch.chdir(tmp_path)
    model, tracer = mlp(), MemoryTracer()
    with tracer.trace(model):
        model(torch.ones(4, 64))
    tracer.export_timeline("memory_timeline.json")
    exec(  # the page is the project's own brief
        code,
        {
            "torch": torch,
            "YourModel": mlp,
            "batch_size": 4,
            "model": model,
            "tracer": tracer,
            "MemoryTracer": MemoryTracer,
            "input_tensor": torch.ones(4, 64),
            "lock": threading.Lock(),
            "events": [],
            "event": None,
            "result": None,
        },
    )


def test_a_script_of_its_forerunners_may_name_the_arguments_of_its_reference(tmp_path):
    tracer = gpu_optimizer.MemoryTracer(max_events=100, device="cpu", enable_fragmentation_tracking=False)
    with tracer.trace(model=mlp()) as entered:
        assert entered is tracer
    tracer.export_flame_graph(output_path=tmp_path / "flame.json")
    tracer.export_timeline(output_path=str(tmp_path / "timeline.json"))
    assert {path.name for path in tmp_path.iterdir()} == {"flame.json", "timeline.json"}


def test_its_dataclasses_are_made_with_the_pages_fields_and_read_with_vars():
    stats = LayerMemoryStats("fc", 8, 16, 2, 1, 0.5, 3.0)
    event = MemoryEvent(0.5, "alloc", 4, None, 8, 16, 0.5)
    assert list(vars(stats).values())[:7] == ["fc", 8, 16, 2, 1, 0.5, 3.0]
    assert list(vars(event).values()) == [0.5, "alloc", 4, None, 8, 16, 0.5]
