"""export of what MemoryMonitor alone recorded."""

from __future__ import annotations

import csv
import json

import pytest

from tb_memplugin.store.writer import RunWriter, StepsWriter
from tests.commands.files import refused, run
from tests.step_figures import figures
from tests.traces import trace


@pytest.fixture
def logdir(tmp_path):
    """Two runs with one watched worker each."""
    for name, peaks in (("a", [400, 800]), ("b", [500])):
        StepsWriter(str(tmp_path / "runs" / name), "rank0", 0).write(figures(peaks, notes=[f"note {name}"]))
    return tmp_path / "runs"


def peaks_in(path):
    with path.open(newline="", encoding="utf-8") as stream:
        return [(row["folder"], int(row["peak_allocated"])) for row in csv.DictReader(stream)]


def test_csv_has_every_step_of_every_worker(logdir, tmp_path):
    result = run("export", str(logdir), "--to", "csv", "-o", str(tmp_path / "out.csv"))
    assert result.exit_code == 0, result.stderr
    a, b = (str(logdir / name / "rank0.steps") for name in "ab")
    assert peaks_in(tmp_path / "out.csv") == [(a, 400), (a, 800), (b, 500)]
    assert "note: rank0: note a" in result.stderr


def test_json_too(logdir, tmp_path):
    result = run("export", str(logdir / "b"), "--to", "json", "-o", str(tmp_path / "out.json"), "--json")
    assert json.loads(result.stdout)["notes"] == ["rank0: note b"]
    (worker,) = json.loads((tmp_path / "out.json").read_text())["workers"]
    assert [step["devices"][0]["peak_allocated"] for step in worker["steps"]] == [500]


@pytest.mark.parametrize("format_", ["html", "perfetto", "speedscope", "snapshot"])
def test_other_formats_are_refused_with_what_to_do(logdir, tmp_path, format_):
    message = refused("export", logdir, "--to", format_, "-o", tmp_path / "out")
    assert f"{format_} needs single allocations" in message
    assert "--to csv" in message
    assert not (tmp_path / "out").exists()


def test_where_a_step_is_recorded_in_full_the_monitors_folder_has_the_figures(logdir, tmp_path):
    RunWriter(str(logdir / "a"), "rank0").write(trace("step 1", "alloc 100 a", "free a"))
    for folder, column in (("a", "bytes"), ("a/rank0.steps", "peak_allocated")):
        assert run("export", str(logdir / folder), "--to", "csv", "-o", str(tmp_path / "x")).exit_code == 0
        assert column in (tmp_path / "x").read_text().partition("\n")[0].split(",")


def test_a_folder_without_any_recording_is_told(tmp_path):
    assert "no memory recording" in refused("export", tmp_path, "--to", "csv", "-o", tmp_path / "out.csv")


def test_a_command_that_needs_allocations_says_how_to_get_the_figures(logdir):
    message = refused("peak", logdir)
    assert "only MemoryMonitor figures, of 3 steps" in message
    assert f"tb-memplugin export {logdir} --to csv" in message
