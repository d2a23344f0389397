"""`ranks`: all workers of a run side by side; every number is the one that the other routes tell."""

from __future__ import annotations

import pytest

from tb_memplugin.store.writer import RunWriter, StepsWriter
from tests.server.tab import Tab
from tests.step_figures import figures
from tests.traces import CUDA_CAPACITY, trace


def record(folder, worker, peaks, first=0, device="cuda:0"):
    """Steps in full, each with a peak of so many bytes, in a reserve of twice as many."""
    lines = []
    for step, peak in enumerate(peaks, first):
        place = f"device={device} module=layer category=activation reserved={2 * peak}"
        lines += [f"step {step}", f"alloc {peak} a{step} {place}", f"free a{step} device={device}"]
    RunWriter(str(folder), worker).write(trace(*lines))


@pytest.fixture
def tab(tmp_path):
    """Rank 2 peaks highest, at step 1; rank 10 has no step 2; of rank 1 a monitor watched all steps."""
    run = tmp_path / "run"
    record(run, "rank0", [100, 300, 200])
    record(run, "rank2", [100, 900, 200])
    record(run, "rank10", [50, 500])
    record(run, "rank1", [70], first=2, device="cuda:1")
    StepsWriter(str(run), "rank1", 0).write(figures([400, 600, 60], device="cuda:1"))
    return Tab(tmp_path)


def rows(answer):
    return {row["worker"]: row for row in answer["rows"]}


def test_ranks_come_in_the_order_of_their_numbers_with_what_is_missing_missing(tab):
    answer = tab.get("ranks", run="run", device="cuda:0")
    assert (answer["of"], answer["offered"], answer["count"]) == ("allocated", ["allocated", "reserved"], 3)
    assert answer["first"] == answer["last"] == [0, 1, 2]
    assert {row["worker"]: row["bytes"] for row in answer["rows"]} == {
        "rank0": [100, 300, 200],
        "rank1": [400, 600, 70],  # of step 2 what was recorded, as in the other views
        "rank2": [100, 900, 200],
        "rank10": [50, 500, None],
    }
    assert [row["worker"] for row in answer["rows"]] == ["rank0", "rank1", "rank2", "rank10"]
    assert [row["steps"] for row in answer["rows"]] == [None] * 4


def test_the_highest_is_told_against_the_median_rank_at_its_step(tab):
    found = rows(tab.get("ranks", run="run", device="cuda:0"))
    median = {"worker": "rank10", "device": "cuda:0", "bytes": 500, "recorded": True}
    assert found["rank2"] == {
        "worker": "rank2",
        "device": "cuda:0",
        "capacity_bytes": CUDA_CAPACITY,
        "count": 3,
        "highest_bytes": 900,
        "highest_step": 1,
        "at_least": False,
        "recorded": True,
        "lowest_bytes": 100,
        "lowest_step": 0,
        "median": median,
        "bytes": [100, 900, 200],
        "steps": None,
    }
    assert found["rank1"]["recorded"] is False
    assert found["rank1"]["median"] == median


def test_every_number_is_that_of_the_step_itself(tab):
    for of, name in (("allocated", "peak_bytes"), ("reserved", "peak_reserved_bytes")):
        answer = tab.get("ranks", run="run", device="cuda", of=of)
        for row in answer["rows"]:
            place = {"run": "run", "worker": row["worker"], "device": row["device"]}
            for step, bytes_ in zip(answer["first"], row["bytes"], strict=True):
                if bytes_ is None:
                    continue
                watched = row["worker"] == "rank1" and step < 2
                told = tab.get("step_figures" if watched else "step", **place, step=step)
                assert bytes_ == (told if watched else told["stats"])[name]


def test_of_many_steps_a_cell_names_the_step_of_its_highest(tab):
    answer = tab.get("ranks", run="run", device="cuda:0", px=1)
    assert (answer["first"], answer["last"], answer["count"]) == ([0], [2], 3)
    assert [(row["bytes"], row["steps"]) for row in answer["rows"]] == [
        ([300], [1]),
        ([600], [1]),
        ([900], [1]),
        ([500], [1]),
    ]
    zoomed = tab.get("ranks", run="run", device="cuda:0", first=2, last=2)
    assert rows(zoomed)["rank2"]["bytes"] == [200]
    assert rows(zoomed)["rank2"]["highest_bytes"] == 900  # of all steps, whatever is on show


def test_only_devices_of_the_asked_kind_stand_side_by_side(tmp_path):
    record(tmp_path / "run", "rank0", [5], device="cuda:0")
    record(tmp_path / "run", "rank1", [7], device="cpu")
    StepsWriter(str(tmp_path / "run"), "rank1", 0).write(figures([900], device="process"))
    tab = Tab(tmp_path)
    for device, worker, offered in (
        ("cuda:0", "rank0", ["allocated", "reserved"]),
        ("process", "rank1", ["allocated"]),
    ):
        answer = tab.get("ranks", run="run", device=device, of="reserved")
        assert [row["worker"] for row in answer["rows"]] == [worker]
        assert answer["offered"] == offered
        assert answer["of"] == offered[-1]
    status, error = tab.refused("ranks", run="run", device="xpu")
    assert status == 404
    assert "no worker with a device of this kind" in error["what"]


def test_of_a_step_recorded_twice_the_last_window_counts(tmp_path):
    writer = RunWriter(str(tmp_path / "run"), "rank0")
    for peak in (900, 300):
        writer.write(trace("step 4", f"alloc {peak} a", "free a"))
    tab = Tab(tmp_path)
    (row,) = tab.get("ranks", run="run", device="cpu")["rows"]
    told = tab.get("step", run="run", worker="rank0", step=4, device="cpu")
    assert row["bytes"] == [told["stats"]["peak_bytes"]] == [300]
