"""The route `advice`: what the analysis says of the picked device's window, and nothing else."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from tb_memplugin.analysis.advice_rules import RULES
from tb_memplugin.store.writer import RunWriter, StepsWriter
from tests.server.tab import Tab
from tests.step_figures import figures
from tests.traces import trace

GROWING = trace(
    "start 70 w",
    *(
        line
        for step in range(4)
        for line in (
            f"step {step}",
            f"alloc 100 loss{step} module=net operator=aten::add",
            f"alloc 900 t{step} operator=mm",
            f"free t{step}",
            f"alloc 8 x{step} device=cuda:0 reserved=64",
            f"free x{step} device=cuda:0 reserved=64",
        )
    ),
)
KINDS = set(RULES)


@pytest.fixture
def growing(tmp_path):
    RunWriter(str(tmp_path / "growing"), "rank0").write(GROWING)
    return Tab(tmp_path)


def ask(tab, device):
    return tab.get("advice", run="growing", worker="rank0", step=2, device=device)


def test_findings_have_their_evidence_and_where_to_see_it(growing):
    answer = ask(growing, "cpu")
    assert (answer["steps"], answer["watched_steps"]) == ([0, 1, 2, 3], 0)
    (finding,) = answer["findings"]
    assert {key: finding[key] for key in ("kind", "level", "step", "bytes", "of_bytes", "subject")} == {
        "kind": "growth",
        "level": "problem",
        "step": 3,
        "bytes": 100,
        "of_bytes": 1370,
        "subject": "net · aten::add",
    }
    assert finding["levels"] == [70, 170, 270, 370, 470]
    where = {"view": "allocations", "state": {"step": "3", "search": "net", "listed": "lifetime"}}
    assert finding["where"] == where
    (row,) = finding["evidence"]
    assert (row["what"], row["bytes"], row["name"], row["where"]) == ("net · aten::add", 400, True, where)


def test_every_rule_says_what_it_came_to_on_the_picked_device_alone(growing):
    for device, found in (("cpu", {"growth"}), ("cuda:0", set())):
        told = ask(growing, device)["judgements"]
        assert {one["kind"] for one in told} == KINDS
        assert len(told) == len(KINDS)
        assert {one["kind"] for one in told if one["verdict"] == "found"} == found
        assert all(one["why"] for one in told)


@pytest.mark.parametrize("watched", ["cpu", "process"])
@pytest.mark.parametrize("steps", [1, 4])
def test_growth_that_only_the_monitor_of_the_worker_saw(tmp_path, steps, watched):
    """Four steps that keep nothing are no evidence that a thousand do not."""
    lines = (line for step in range(steps) for line in (f"step {step}", "alloc 70 w", "free w"))
    RunWriter(str(tmp_path / "run"), "rank0").write(trace(*lines))
    rising = figures(2 * (1000 + 100 * np.arange(1000)), device=watched)
    StepsWriter(str(tmp_path / "run"), "rank0", 0).write(rising)
    answer = Tab(tmp_path).get("advice", run="run", worker="rank0", step=0, device="cpu")
    assert [(one["kind"], one["bytes"]) for one in answer["findings"]] == [("growth", 100)]
    assert (answer["peak"]["bytes"], sum(one["bytes"] for one in answer["peak"]["holders"])) == (70, 70)


def test_a_run_that_was_only_watched_is_judged_by_its_figures(tmp_path):
    StepsWriter(str(tmp_path / "run"), "rank0", 0).write(figures(2 * (1000 + 100 * np.arange(1000))))
    tab = Tab(tmp_path)
    chosen = {"run": "run", "worker": "rank0", "device": "cuda:0"}
    answer = tab.get("advice", **chosen, step=7)
    assert (answer["steps"], answer["watched_steps"], answer["peak"]) == ([], 1000, None)
    assert [(one["kind"], one["bytes"]) for one in answer["findings"]] == [("growth", 100)]
    verdicts = {one["kind"]: one["verdict"] for one in answer["judgements"]}
    assert (verdicts.pop("growth"), set(verdicts), set(verdicts.values())) == (
        "found",
        KINDS - {"growth"},
        {"not judged"},
    )
    status, error = tab.refused("advice", **chosen, step=1000)
    assert (status, "did not see step 1000" in json.dumps(error)) == (404, True)
    status, error = tab.refused("advice", **chosen | {"run": "other"}, step=7)
    assert (status, "did not see" in json.dumps(error)) == (404, False)


def test_without_the_side_file_the_absent_file_is_named(growing, tmp_path):
    side_file = next(tmp_path.rglob("*.mem"))
    side_file.unlink()
    status, error = growing.refused("advice", run="growing", worker="rank0", step=2, device="cpu")
    assert (status, side_file.name in json.dumps(error)) == (404, True)


def test_growth_that_only_several_windows_show_is_found_from_any_of_them(tmp_path):
    writer = RunWriter(str(tmp_path / "long"), "rank0")
    for step in (0, 10, 20, 30):
        lines = (f"start {100 + 10 * step} old", f"step {step}", "alloc 10 x module=net operator=add")
        writer.write(replace(trace(*lines), source="IterationReport"))
    tab = Tab(tmp_path)
    for step in (0, 30):
        (finding,) = tab.get("advice", run="long", worker="rank0", step=step, device="cpu")["findings"]
        assert (finding["kind"], finding["bytes"], finding["step"]) == ("growth", 10, 30)
        assert finding["levels"] == [100, 200, 300, 400]


def test_a_window_that_cannot_be_read_does_not_count(tmp_path):
    writer = RunWriter(str(tmp_path / "long"), "rank0")
    for step in range(0, 50, 10):
        recorded = trace(f"start {100 + step} old", f"step {step}", "alloc 9 x")
        writer.write(replace(recorded, source="IterationReport"))
    side_files = sorted(tmp_path.rglob("*.mem"))
    side_files[2].write_bytes(b"damaged")
    tab = Tab(tmp_path)
    (finding,) = tab.get("advice", run="long", worker="rank0", step=40, device="cpu")["findings"]
    assert finding["levels"] == [100, 110, 130, 140]
