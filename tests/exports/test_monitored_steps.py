"""The figures of monitored steps as CSV and JSON: a row per step, device and phase."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict, replace

import numpy as np
import pytest

from tb_memplugin import MemPluginError
from tb_memplugin.exports.monitored_steps import COLUMNS, write_csv, write_json
from tb_memplugin.record.steps.recording import DeviceStep, MonitoredStep, PhaseStep
from tb_memplugin.trace.step_figures import WatchedSteps
from tests.step_figures import figures

CARD = figures([400, 800], phases={"forward": [300, 0]}, retries=[0, 2])


def rows(path, *workers):
    write_csv(workers, path)
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def document(path, *workers):
    write_json(workers, path)
    return json.loads(path.read_text())


def test_a_row_for_each_step_and_each_phase_that_ran(tmp_path):
    first, forward, second = rows(tmp_path / "out.csv", WatchedSteps("runs/a/rank0.steps", "rank0", CARD))
    assert tuple(first) == COLUMNS
    assert list(first.values()) == [
        *("runs/a/rank0.steps", "rank0", "0", "cuda:0", "", "", "100000000"),
        *("400", "true", "200", "800", "800", "0.75", "0", "0", "7", "1200", "", "", "", ""),
    ]
    assert {name: text for name, text in forward.items() if text} == {
        "folder": "runs/a/rank0.steps",
        "worker": "rank0",
        "step": "0",
        "device": "cuda:0",
        "phase": "forward",
        "count": "1",
        "duration_ns": "1000",
        "peak_allocated": "300",
        "exact": "true",
        "allocated": "75",
    }
    assert (second["step"], second["phase"], second["num_alloc_retries"]) == ("1", "", "2")


def test_what_a_device_does_not_have_is_an_empty_cell(tmp_path):
    (row,) = rows(tmp_path / "out.csv", WatchedSteps("a", "rank0", figures([100], device="process")))
    assert [name for name, text in row.items() if not text] == ["phase", "count", *COLUMNS[10:]]


def test_a_lower_bound_is_not_exact(tmp_path):
    (device,) = CARD.devices
    bound = replace(CARD, devices=(replace(device, at_least=np.array([False, True])),), phases=())
    assert [row["exact"] for row in rows(tmp_path / "x", WatchedSteps("a", "rank0", bound))] == [
        "true",
        "false",
    ]


def test_several_devices_and_workers(tmp_path):
    (phase,) = CARD.phases
    two = replace(
        CARD,
        devices=(*CARD.devices, *figures([4, 8], device="process").devices),
        phases=(
            replace(
                phase, devices=(*phase.devices, *figures([3, 0], phases={"f": [3, 0]}).phases[0].devices)
            ),
        ),
    )
    workers = [WatchedSteps("a", "rank0", two), WatchedSteps("b", "rank1", figures([5]))]
    told = [
        (row["worker"], row["step"], row["device"], row["phase"], row["peak_allocated"])
        for row in rows(tmp_path / "out.csv", *workers)
    ]
    assert told == [
        ("rank0", "0", "cuda:0", "", "400"),
        ("rank0", "0", "cuda:0", "forward", "300"),
        ("rank0", "0", "process", "", "4"),
        ("rank0", "0", "process", "forward", "3"),
        ("rank0", "1", "cuda:0", "", "800"),
        ("rank0", "1", "process", "", "8"),
        ("rank1", "0", "cuda:0", "", "5"),
    ]


def test_no_text_is_a_formula(tmp_path):
    evil = figures([1], phases={"=1+1": [1]})
    _, phase = rows(tmp_path / "out.csv", WatchedSteps("a", "@rank", evil))
    assert (phase["worker"], phase["phase"]) == ("'@rank", "'=1+1")


def test_json_has_the_steps_as_the_monitor_returned_them(tmp_path):
    told = document(tmp_path / "x", WatchedSteps("a", "rank0", CARD), WatchedSteps("b", "1", figures([])))
    assert (told["format"], told["version"]) == ("tb_memplugin.steps", 1)
    first, empty = told["workers"]
    assert (empty["folder"], empty["worker"], empty["steps"]) == ("b", "1", [])
    assert first["devices"] == [
        {"name": "cuda:0", "kind": "allocator", "product": "A Card", "capacity_bytes": 1 << 40}
    ]
    device = DeviceStep("cuda:0", 400, True, 200, 800, 800, 0, 0, 7, 1200)
    forward = PhaseStep("forward", 1, 1000, (300,), (True,), (75,))
    expected = json.loads(json.dumps(asdict(MonitoredStep(0, 100_000_000, (device,), (forward,)))))
    assert first["steps"][0]["devices"][0].pop("fragmentation") == device.fragmentation == 0.75
    assert first["steps"][0] == expected
    assert first["steps"][1]["phases"] == []


def test_a_file_that_cannot_be_written_is_told(tmp_path):
    with pytest.raises(MemPluginError, match="cannot be written"):
        write_csv([], tmp_path / "absent" / "out.csv")
