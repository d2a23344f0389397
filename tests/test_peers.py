"""Beside torch-tb-profiler: the same TensorBoard serves both, and its numbers agree where it has them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tb_memplugin.analysis.steps import step_stats
from tests.tensorboard.process import tensorboard
from tests.training import MODELS, Cycle, train

data = pytest.importorskip("torch_tb_profiler.profiler.data", reason="torch-tb-profiler is not installed")


@pytest.fixture(scope="module")
def cycle() -> Cycle:
    (only,) = train(MODELS["cnn"]())
    return only


def test_its_memory_records_sum_to_our_window(cycle):
    """It parses the exported trace itself; its records are the profiler's events in the order of time."""
    parsed = data.RunProfileData.from_json("worker", "0", cycle.chrome)
    records = sorted(parsed.memory_snapshot.memory_records, key=lambda record: record.ts)
    base = records[0].total_allocated - records[0].bytes
    highest = max(record.total_allocated for record in records) - base
    assert max(step.window_peak_bytes for step in step_stats(cycle.trace, 0)) == highest
    assert sum(record.bytes for record in records) == cycle.trace.window(0)[-1]


def test_both_tabs_stand_in_one_tensorboard(tmp_path: Path):
    with tensorboard(tmp_path) as server:
        listing = json.loads(server.fetch("data/plugins_listing")[1])
    assert {"tb_memplugin", "pytorch_profiler"} <= listing.keys()
    assert listing["tb_memplugin"]["tab_name"] == "Memory"
