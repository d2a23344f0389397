"""`fleet`: a row a run, from figures alone; every number is one that a person can work out."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tb_memplugin.store.blob import read_metadata
from tb_memplugin.store.health import MOST_SIDE_FILES
from tb_memplugin.store.worker_steps import worker_steps
from tb_memplugin.store.writer import RunWriter, StepsWriter
from tb_memplugin.trace import Kind, OutOfMemory
from tb_memplugin.trace.labels import DUMP_OF
from tests.server.tab import Tab
from tests.step_figures import figures
from tests.traces import CUDA_CAPACITY, trace

LINE = "train.py:12 (step)"


def kept(*sizes, device="cuda:0"):
    """Steps that each allocate 100 bytes for a while, and keep so many."""
    lines = []
    for step, size in enumerate(sizes):
        place = f"device={device}" if device == "cpu" else f"device={device} reserved=8000"
        lines += [f"step {step}", f"alloc {size} k{step} {place}", f"alloc 100 t{step} {place}"]
        lines += [f"free t{step} device={device}"]
    return trace(*lines)


def failing(*sizes, frame="step train.py:12"):
    """The same, whose last event is a request for 999 bytes that failed at a line."""
    made = kept(*sizes)
    kind, stack, size = made.events.kind.copy(), made.events.stack.copy(), made.events.bytes.copy()
    kind[-1], stack[-1], size[-1] = Kind.OOM, 0, 999
    events = replace(made.events, kind=kind, stack=stack, bytes=size)
    ooms = (OutOfMemory(len(events) - 1, 999, 1),)
    return replace(made, events=events, stacks=((frame,),), ooms=ooms)


@pytest.fixture
def tab(tmp_path):
    """Rank 1 of `ddp` keeps 50 bytes a step; two of the others ran out of memory."""
    RunWriter(str(tmp_path / "ddp"), "rank0").write(kept(7, 0, 0, 0))
    RunWriter(str(tmp_path / "ddp"), "rank1").write(kept(50, 50, 50, 50))
    RunWriter(str(tmp_path / "short"), "rank0").write(kept(1, 1))
    RunWriter(str(tmp_path / "out" / "a"), "rank0").write(failing(5, 5))
    RunWriter(str(tmp_path / "out" / "b"), "rank0").write(failing(5, 600))
    StepsWriter(str(tmp_path / "watched"), "rank0", 0).write(figures(1000 + 10 * np.arange(100)))
    return Tab(tmp_path)


def rows(answer):
    return {row["run"]: row for row in answer["runs"]}


def test_a_run_is_its_highest_rank_and_says_which_one_grows(tab):
    answer = tab.get("fleet")
    assert answer["count"] == 5
    assert [row["run"] for row in answer["runs"]] == ["ddp", "out/a", "out/b", "short", "watched"]
    assert rows(answer)["ddp"] == {
        "run": "ddp",
        "ranks": 2,
        "worker": "rank1",
        "device": "cuda:0",
        "step": 3,
        "peak_bytes": 300,
        "at_least": False,
        "capacity_bytes": CUDA_CAPACITY,
        "process": None,
        "median": {"worker": "rank0", "device": "cuda:0", "bytes": 107},
        "growth_bytes": 50,
        "growing": {"worker": "rank1", "device": "cuda:0", "bytes": 50},
        "failed": None,
        "failed_known": True,
        "steps": 4,
        "first": 0,
        "last": 3,
        "curve": [500, 666, 833, 1000],  # 150, 200, 250, 300
    }


def test_growth_is_judged_as_by_advice_and_not_of_too_few_steps(tab):
    found = rows(tab.get("fleet"))
    assert (found["short"]["growth_bytes"], found["short"]["growing"]) == (None, None)
    assert found["watched"]["growth_bytes"] == 5  # figures() leave half of a peak that rises by 10
    advice = tab.get("advice", run="ddp", worker="rank1", step=3, device="cuda:0")
    (finding,) = [one for one in advice["findings"] if one["kind"] == "growth"]
    assert finding["bytes"] == found["ddp"]["growing"]["bytes"]


def test_a_failed_request_tells_its_line_without_the_side_file(tab, tmp_path):
    for file in tmp_path.rglob("*.mem"):
        file.unlink()
    found = rows(tab.get("fleet"))
    assert found["out/a"]["failed"] == {
        "count": 1,
        "worker": "rank0",
        "device": "cuda:0",
        "step": 1,
        "requested_bytes": 999,
        "line": LINE,
    }
    assert found["out/b"]["failed"]["line"] == LINE
    assert (found["watched"]["failed"], found["watched"]["failed_known"]) == (None, True)


def test_a_monitor_that_counted_failures_knows_no_line(tmp_path):
    seen = figures([100] * 5)
    device = replace(seen.devices[0], ooms=np.array([0, 2, 0, 1, 0]))
    StepsWriter(str(tmp_path / "watched"), "rank3", 0).write(replace(seen, devices=(device,)))
    (row,) = Tab(tmp_path).get("fleet")["runs"]
    assert row["failed"] == {
        "count": 3,
        "worker": "rank3",
        "device": "cuda:0",
        "step": 3,
        "requested_bytes": None,
        "line": None,
    }


def test_a_pattern_searches_runs_ranks_and_lines_and_a_filter_what_tensorboard_calls_runs(tab):
    def found(**parameters):
        return [row["run"] for row in tab.get("fleet", **parameters)["runs"]]

    assert found(pattern="^OUT/.$") == ["out/a", "out/b"]
    assert found(pattern=r"train\.py:1\d") == ["out/a", "out/b"]
    assert found(pattern="rank1") == ["ddp"]
    assert found(filter="rank1$") == ["ddp"]
    assert found(filter="out|short", pattern="b|s") == ["out/a", "out/b", "short"]
    assert found(run="short") == ["short"]


@pytest.mark.parametrize(
    "pattern", ["(", "(?P<x>a)(?P<x>b)", "(" * 5_000 + ")" * 5_000, "a{2}" * 3_000 + "{1,99999999999}"]
)
def test_a_pattern_that_is_none_is_refused(tab, pattern):
    status, error = tab.refused("fleet", pattern=pattern)
    assert (status, error["where"]) == (400, "pattern")
    assert "is not a valid regular expression" in error["what"]


def test_a_pattern_that_never_ends_ends(tab, tmp_path, monkeypatch):
    monkeypatch.setattr("tb_memplugin.server.rule_search.SECONDS", 0.5)
    RunWriter(str(tmp_path / ("a" * 60)), "rank0").write(kept(1))
    tab.reload()
    _, error = tab.refused("fleet", pattern="^(a+)+$b")
    assert "took more than" in error["what"]


def test_a_recording_of_an_earlier_version_does_not_say_whether_a_request_failed():
    golden = Path(__file__).parents[1] / "store" / "golden" / "step-v1.metadata"
    metadata = read_metadata(golden.read_bytes())
    (cpu, cuda) = worker_steps("rank0", [metadata], None)
    assert (cpu.device, cuda.device) == ("cpu", "cuda:0")
    assert cpu.failed is cuda.failed is None


def test_on_the_cpu_only_steps_of_one_window_are_compared(tmp_path):
    writer = RunWriter(str(tmp_path / "run"), "rank0")
    writer.write(kept(50, 50, device="cpu"))
    writer.write(kept(50, 50, device="cpu"))
    assert Tab(tmp_path).get("fleet")["runs"][0]["growth_bytes"] is None
    writer.write(kept(50, 50, 50, device="cpu"))
    assert Tab(tmp_path).get("fleet")["runs"][0]["growth_bytes"] == 50


def test_batches_in_shared_memory_do_not_stand_for_what_a_training_on_the_cpu_needs(tmp_path):
    """As a DataLoader's workers make them: shared memory is a device of its own."""
    lines = ["step 0", "alloc 10 batch device=shared", "alloc 500 weight device=cpu"]
    RunWriter(str(tmp_path / "run"), "w").write(trace(*lines))
    run = rows(Tab(tmp_path).get("fleet"))["run"]
    assert (run["device"], run["peak_bytes"]) == ("cpu", 500)


@pytest.mark.parametrize("recorded", [(50, 50), (0, 0, 0), (50, 50, 50)])
def test_growth_of_many_watched_steps_comes_before_that_of_few_recorded_ones(tmp_path, recorded):
    """Two steps are too few, three keep nothing, or 50 bytes each; the process 5 with each of 60 steps."""
    RunWriter(str(tmp_path / "run"), "rank0").write(kept(*recorded, device="cpu"))
    watched = figures(1000 + 10 * np.arange(60), device="process")
    StepsWriter(str(tmp_path / "run"), "rank0", 0).write(watched)
    (row,) = Tab(tmp_path).get("fleet")["runs"]
    assert (row["device"], row["steps"], row["growth_bytes"]) == ("cpu", len(recorded), 5)


def test_whether_the_hosts_memory_ran_out_is_not_known(tmp_path):
    RunWriter(str(tmp_path / "run"), "rank0").write(kept(50, device="cpu"))
    (row,) = Tab(tmp_path).get("fleet")["runs"]
    assert (row["failed"], row["failed_known"]) == (None, False)


def test_a_recording_tells_the_line_and_a_monitor_how_many(tmp_path):
    RunWriter(str(tmp_path / "run"), "rank0").write(failing(5, 5))
    seen = figures([100] * 5)
    device = replace(seen.devices[0], ooms=np.array([0, 2, 0, 1, 0]))
    StepsWriter(str(tmp_path / "run"), "rank0", 0).write(replace(seen, devices=(device,)))
    (row,) = Tab(tmp_path).get("fleet")["runs"]
    assert (row["failed"]["count"], row["failed"]["line"], row["steps"]) == (3, LINE, 5)


def test_many_runs_are_listed_without_opening_a_side_file(tmp_path):
    RunWriter(str(tmp_path / "run0"), "rank0").write(kept(5, 6, 7))
    for number in range(1, MOST_SIDE_FILES + 1):
        shutil.copytree(tmp_path / "run0", tmp_path / f"run{number}")
    opened, listens = [], [True]

    def hear(event, arguments):
        if event == "open" and listens:
            opened.append(str(arguments[0]))

    sys.addaudithook(hear)  # it stays until the process ends
    tab = Tab(tmp_path)
    assert len(tab.get("runs")["runs"]) == tab.get("fleet")["count"] == MOST_SIDE_FILES + 1
    listens.clear()
    assert sum(path.endswith(".tb_memplugin") for path in opened) > MOST_SIDE_FILES
    assert [path for path in opened if path.endswith(".mem")] == []


def test_the_dump_of_a_failure_comes_before_a_monitor_that_counted_it_in_a_later_step(tmp_path):
    """The request failed in backward, in a thread without a Python frame: its bytes are known, no line."""
    dump = failing(5)
    RunWriter(str(tmp_path / "run"), "oom_rank0").write(
        replace(dump, events=replace(dump.events, stack=np.full_like(dump.events.stack, -1)))
    )
    seen = figures([600] * 5)
    device = replace(seen.devices[0], ooms=np.array([0, 0, 0, 0, 1]))
    StepsWriter(str(tmp_path / "run"), "rank0", 0).write(replace(seen, devices=(device,)))
    failed = rows(Tab(tmp_path).get("fleet"))["run"]["failed"]
    assert (failed["worker"], failed["requested_bytes"], failed["line"]) == ("oom_rank0", 999, None)


def test_dumps_of_each_other_are_ranks(tmp_path):
    for worker, dumped in (("a", "b"), ("b", "a"), ("c", "c")):
        dump = replace(failing(10), properties={DUMP_OF: dumped})
        RunWriter(str(tmp_path / "run"), worker).write(dump)
    (row,) = Tab(tmp_path).get("fleet")["runs"]
    assert row["ranks"] == 3


def test_the_dump_of_a_rank_is_no_rank(tmp_path):
    """Rank 0 peaks at 110 and rank 1 at 150 bytes; what rank 0 wrote when a request failed has 1,110."""
    dump = failing(10, 1000)
    RunWriter(str(tmp_path / "run"), "rank0").write(kept(10, 0, 0))
    RunWriter(str(tmp_path / "run"), "rank1").write(kept(50, 0, 0))
    RunWriter(str(tmp_path / "run"), "dump").write(replace(dump, properties={DUMP_OF: "rank0"}))
    tab = Tab(tmp_path)
    row = rows(tab.get("fleet"))["run"]
    assert (row["ranks"], row["worker"], row["peak_bytes"], row["median"]) == (2, "dump", 1110, None)
    assert (row["failed"]["worker"], row["growing"]) == ("dump", None)
    ranks = tab.get("ranks", run="run", device="cuda:0")["rows"]
    assert [(rank["worker"], rank["highest_bytes"]) for rank in ranks] == [("rank0", 110), ("rank1", 150)]
    (run,) = tab.get("runs")["runs"]
    assert {worker["worker"]: worker["dump_of"] for worker in run["workers"]} == {
        "dump": "rank0",
        "rank0": "",
        "rank1": "",
    }
