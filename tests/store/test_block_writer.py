"""What one tracer saves to one place, block after block."""

from __future__ import annotations

import pytest
import torch

from tb_memplugin import LineTracer, MemoryTracer
from tb_memplugin.store.reader import load_window
from tests.test_tracer import mlp


@pytest.mark.parametrize("kind", [MemoryTracer, LineTracer])
def test_blocks_saved_to_one_place_are_steps_of_one_run(kind, tmp_path, caplog):
    model, tracer = mlp(), kind()
    for number in range(4):
        with tracer if kind is LineTracer else tracer.trace(model):
            model(torch.ones(2, 64))
        if number != 1:
            tracer.save(tmp_path, "w")
    assert [path.name for path in tmp_path.iterdir()] == ["w"]
    written = [load_window(str(path)) for path in sorted(tmp_path.rglob("*.mem"))]
    assert [step.number for one in written for step in one.steps] == [0, 2, 3]
    assert not caplog.records
    tracer.save(tmp_path, "w")  # the same once more goes beside it
    assert sorted(path.name for path in tmp_path.iterdir()) == ["w", "w.2"]
