"""Modules under wrappers: hooks around a forward, as FSDP2 registers, and a model that is moved before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tb_memplugin.read.layers.calls import Call
from tb_memplugin.read.layers.inferred import with_inferred_layers
from tb_memplugin.read.layers.parameters import Gradient, Moved, match_moved
from tb_memplugin.read.snapshot.trace import trace_from_snapshot
from tests.read.layers.stacks import CALL, MAIN, Frame, modules, snapshot_of

TEXT = """from torch import nn
class Block(nn.Module):
    def forward(self, x):
        return x + 1
class Model(nn.Module):
    def __init__(self):
        self.layers = nn.ModuleList(Block() for _ in range(3))
    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x)
        return x
"""
CHECKPOINT: Frame = ("checkpoint", "site-packages/torch/utils/checkpoint.py", 519)


def hooks(line: int) -> Frame:
    return ("inner", "site-packages/torch/nn/modules/module.py", line)


def test_a_free_after_a_forward_does_not_end_the_call_whose_hooks_still_run(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text(TEXT, "utf-8")
    call = [MAIN, CALL, ("forward", str(file), 10), CHECKPOINT, CALL]
    gather = [*call, hooks(1811), ("gather", "fsdp.py", 5)]
    forward = [*call, hooks(1832), ("forward", str(file), 4)]
    content = snapshot_of(*[(8, gather), (4, forward)] * 3)
    entries: list[dict[str, Any]] = content["device_traces"][0]
    for at in (4, 2, 0):  # of each call, the function around the forward frees its result, a hook the weights
        for allocated, stack in (
            (entries[at], [*call, hooks(1845), ("reshard", "fsdp.py", 9)]),
            (entries[at + 1], [*call, hooks(1832)]),
        ):
            frames = [{"name": name, "filename": file, "line": line} for name, file, line in reversed(stack)]
            free = allocated | {"frames": frames, "time_us": entries[at + 1]["time_us"]}
            entries[at + 2 : at + 2] = [
                free | {"action": f"free_{how}"} for how in ("requested", "completed")
            ]
    for block in content["segments"][0]["blocks"]:
        block["state"] = "inactive"
    trace = with_inferred_layers(trace_from_snapshot(content, "test"))
    names = [name for name in modules(trace) if name != "(not named)"]
    assert names == [f"layers.{index}" for index in (0, 0, 1, 1, 2, 2)]


@pytest.mark.parametrize(("depth", "named"), [(4, 4), (3, 4), (2, 0)])
def test_parameters_that_were_moved_before_the_model_was_wrapped_have_its_names(
    depth: int, named: int
) -> None:
    """For `module.layers.0`, four `_apply` are open, and three if only what is wrapped was moved."""
    model = Call(None, (), (), 0, 0)
    wrapped = Call(model, (), (), 0, 1, name="module", position=1)
    layers = [Call(wrapped, (), (), 0, 2 + at, name=f"layers.{at}", position=1) for at in range(4)]
    gradients = [Gradient(64 + at, call) for at, call in enumerate(layers)]
    moved = [Moved(event, 64 + event, depth) for event in range(4)]
    owner = match_moved(moved, gradients, [model, wrapped, *layers])
    assert [owner[event].fqn() for event in range(named)] == [f"module.layers.{at}" for at in range(named)]
    assert len(owner) == named
