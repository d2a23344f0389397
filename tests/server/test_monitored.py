"""Runs that a monitor watched: listed beside recorded ones, drawn in columns, exact at each step."""

from __future__ import annotations

from dataclasses import replace
from operator import itemgetter
from pathlib import Path

import numpy as np
import pytest

from tb_memplugin.store.step_records import read_figures
from tb_memplugin.store.writer import StepsWriter
from tests.server.tab import Tab
from tests.step_figures import figures

HOSTILE = "<script>alert(1)</script>\n../\0"


@pytest.fixture
def writer(logdir):
    """In the folder of a run that has recorded steps, too, with the same worker's name."""
    writer = StepsWriter(str(logdir / "demo" / "baseline"), "rank0", 0, "2.13.0")
    writer.write(figures([500, 700, 600], device="cpu", phases={"forward": [400, 700, 0]}, retries=[0, 2, 0]))
    return writer


@pytest.fixture
def watched(writer, logdir):
    return Tab(logdir)


CHOSEN = {"run": "demo/baseline", "worker": "rank0", "device": "cpu"}


def worker_of(answer, run="demo/baseline"):
    (found,) = (one for one in answer["runs"] if one["run"] == run)
    (worker,) = found["workers"]
    return worker


def test_a_worker_lists_what_was_recorded_and_what_was_watched(watched):
    worker = worker_of(watched.get("runs"))
    assert worker["steps"]["step"] == [5, 6]
    assert worker["monitored"]["cpu"] == {
        "kind": "allocator",
        "capacity_bytes": 1 << 40,
        "count": 3,
        "first": 0,
        "last": 2,
        "highest_step": 1,
        "highest_bytes": 700,
        "retries": 2,
        "ooms": 0,
        "duration_ns": 300_000_000,
    }
    assert worker_of(watched.get("runs"), "demo/bigger")["monitored"] == {}


def test_a_run_that_was_only_watched_is_listed_without_recorded_steps(logdir):
    StepsWriter(str(logdir / "long"), "rank0", 0).write(figures([1, 2]))
    answer = Tab(logdir).get("runs")
    latest = max(answer["runs"], key=itemgetter("end_ns"))
    assert latest["run"] == "long"  # the steps of the others end in 2025
    worker = worker_of(answer, "long")
    assert worker["steps"] == {"step": [], "window": [], "devices": {}}
    assert (worker["devices"], worker["monitored"]["cuda:0"]["count"]) == ([], 2)


def test_steps_are_drawn_and_a_stretch_of_them(watched):
    answer = watched.get("steps", **CHOSEN)
    assert answer["high"] == [500, 700, 600]
    assert answer["reserved"] == [1000, 1400, 1200]
    assert answer["retries"] == [[1, 2]]
    assert watched.get("steps", **CHOSEN, px=1)["high_step"] == [1]
    assert watched.get("steps", **CHOSEN, first=2, last=2)["high"] == [600]
    assert watched.get("steps", **CHOSEN, first=9, last=10)["count"] == 0


def test_one_step_is_told_to_the_byte(watched):
    answer = watched.get("step_figures", **CHOSEN, step=1)
    assert (answer["peak_bytes"], answer["end_bytes"], answer["duration_ns"]) == (700, 350, 100_000_000)
    assert answer["fragmentation"] == pytest.approx((1400 - 350) / 1400)
    assert (answer["retries"], answer["allocations"], answer["allocated_bytes"]) == (2, 7, 2100)
    assert (answer["previous_step"], answer["previous"]["peak_bytes"]) == (0, 500)
    (phase,) = answer["phases"]
    assert (phase["name"], phase["peak_bytes"], phase["end_bytes"]) == ("forward", 700, 175)
    assert watched.get("step_figures", **CHOSEN, step=2)["phases"] == []
    assert watched.get("step_figures", **CHOSEN, step=0)["previous"] is None


def test_steps_written_later_appear_and_nothing_is_read_twice(watched, writer, monkeypatch):
    watched.get("runs")
    writer.write(figures([900], first=3, device="cpu"))
    watched.reload()
    seen = []

    def counted(*given):
        seen.append(given)
        return read_figures(*given)

    monkeypatch.setattr("tb_memplugin.store.step_records.read_figures", counted)
    assert worker_of(watched.get("runs"))["monitored"]["cpu"]["highest_step"] == 3
    watched.get("runs")
    assert len(seen) == 1


def test_what_is_not_there_is_told(watched):
    status, error = watched.refused("step_figures", **CHOSEN, step=99)
    assert (status, error["fix"]) == (404, "Choose one from 0 to 2.")
    assert "cpu" in watched.refused("steps", **{**CHOSEN, "device": "cuda:7"})[1]["fix"]
    assert "MemoryMonitor" in watched.refused("steps", **{**CHOSEN, "run": "demo/bigger"})[1]["fix"]


def test_a_damaged_record_is_told_and_the_rest_is_shown(logdir, monkeypatch):
    writer = StepsWriter(str(logdir / "long"), "rank0", 0)
    writer.write(figures([1, 2]))
    monkeypatch.setattr("tb_memplugin.store.writer.pack_figures", lambda _: b"\xff\xff")
    writer.write(figures([3], first=2))
    monkeypatch.undo()
    writer.write(figures([4], first=3))
    answer = Tab(logdir).get("runs")
    assert worker_of(answer, "long")["monitored"]["cuda:0"]["count"] == 3
    assert any("damaged" in problem["reason"] for problem in answer["problems"])


def test_hostile_names_are_names(logdir):
    StepsWriter(str(logdir / "hostile"), HOSTILE, 0).write(figures([1], phases={HOSTILE: [1]}))
    tab = Tab(logdir)
    assert worker_of(tab.get("runs"), "hostile")["worker"] == HOSTILE
    chosen = {"run": "hostile", "worker": HOSTILE, "device": "cuda:0", "step": 0}
    assert tab.get("step_figures", **chosen)["phases"][0]["name"] == HOSTILE
    assert {path.parent for path in Path(logdir, "hostile").iterdir()} == {logdir / "hostile"}


def test_a_step_has_what_filled_the_whole_device(tmp_path):
    """500 bytes peaked: 250 allocated at the end of 1,000 reserved ones, as requested 200."""
    (device,) = figures([500]).devices
    requested, free, total = np.array([[200], [900], [2000]])
    device = replace(device, end_requested=requested, whole_free=free, whole_total=total)
    steps = replace(figures([500]), devices=(device,))
    StepsWriter(str(tmp_path / "read"), "rank0", 0).write(steps)
    StepsWriter(str(tmp_path / "old"), "rank0", 0).write(figures([500]))
    answer = Tab(tmp_path).get("step_figures", run="read", worker="rank0", step=0)["whole_device"]
    (moment,) = answer["moments"]
    assert [(part["part"], part["bytes"]) for part in moment["parts"]] == [
        ("requested", 200),
        ("rounding", 50),
        ("cached", 750),
        ("unknown", 100),
        ("free", 900),
    ]
    assert Tab(tmp_path).get("step_figures", run="old", worker="rank0", step=0)["whole_device"] is None


def test_steps_that_were_written_twice_are_shown_once(logdir):
    writer = StepsWriter(str(logdir / "long"), "rank0", 0)
    writer.write(figures([5, 9]))
    writer.write(figures([9, 2, 3], first=1))
    monitored = worker_of(Tab(logdir).get("runs"), "long")["monitored"]["cuda:0"]
    assert (monitored["count"], monitored["last"], monitored["highest_step"]) == (4, 3, 1)


def test_notes_on_steps_are_data(tmp_path):
    StepsWriter(str(tmp_path / "noted"), "rank0", 0).write(figures([5], notes=["told"]))
    answer = Tab(tmp_path).get("step_figures", run="noted", worker="rank0", step=0)
    note = {"code": "steps_missing", "level": "warning", "bytes": None, "device": "", "text": "told"}
    assert answer["notes"] == [note]
