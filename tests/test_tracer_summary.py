"""What `MemoryTracer.print_summary` prints can be read on any terminal."""

from __future__ import annotations

import io

import torch
from rich.console import Console
from torch import nn

from tb_memplugin import MemoryTracer


def test_the_summary_shows_whole_names_on_a_narrow_terminal():
    model, text, tracer = nn.Module(), io.StringIO(), MemoryTracer()
    name = "encoder_with_a_long_name_projection"
    model.register_module(name, nn.Linear(4, 3))
    with tracer.trace(model):
        next(model.children())(torch.ones(2, 4))
    tracer.print_summary(Console(file=text, width=80))
    table = [line for line in text.getvalue().splitlines() if line[0] in "┃│"]
    assert any(line.startswith(f"│ {name} ") for line in table)
    assert not any("reserved" in line for line in table)  # the CPU keeps no reserve


def test_the_summary_says_where_the_peak_is_if_no_layer_reaches_it():
    model, text, tracer = nn.Linear(256, 256, bias=False), io.StringIO(), MemoryTracer()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with tracer.trace(model, optimizer):
        model(torch.ones(1, 256)).sum().backward()
        optimizer.step()
    tracer.print_summary(Console(file=text, width=120))
    assert "The peak is in phase optimizer, operator aten::" in text.getvalue()


def test_no_name_in_the_summary_steers_the_terminal():
    model, text, tracer = nn.Module(), io.StringIO(), MemoryTracer()
    model.register_module("\x1b[2J[red]", nn.Linear(4, 3))
    with tracer.trace(model), tracer.track_phase("\x1b]0;title\x07"):
        next(model.children())(torch.ones(2, 4))
    tracer.print_summary(Console(file=text, width=120))
    assert "\\x1b[2J[red]" in text.getvalue()
    assert not {"\x1b", "\x07"} & set(text.getvalue())
