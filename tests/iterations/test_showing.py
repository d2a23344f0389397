"""Iterations in the console and in CSV files: units for people, exact bytes for data frames."""

from __future__ import annotations

import io
from typing import Any

import pandas as pd
import pytest
import torch
from rich.console import Console
from torch import nn

from tb_memplugin import IterationReport, MemPluginError
from tb_memplugin.record.iterations.figures import Observation, iteration_memory
from tb_memplugin.record.iterations.report import ITERATION_COLUMNS, WEIGHT_COLUMNS, IterationCsv, show, size
from tb_memplugin.record.steps.counters import Reading


def quiet() -> Console:
    return Console(file=io.StringIO(), width=160)


def run(folder, iterations: int = 2, model: Any = None, **options) -> IterationReport:
    model = nn.Linear(4, 3) if model is None else model
    with IterationReport(model, csv=folder, worker_name="w", **{"console": quiet(), **options}) as report:
        for _ in range(iterations):
            model(torch.ones(2, 4)).sum().backward()
            report.record_stats()
    return report


def test_csv_has_a_row_an_iteration_and_a_row_a_weight(tmp_path):
    report = run(tmp_path / "deep" / "folder")
    iterations = pd.read_csv(tmp_path / "deep" / "folder" / "w.iterations.csv")
    weights = pd.read_csv(tmp_path / "deep" / "folder" / "w.weights.csv")
    assert tuple(iterations.columns) == ITERATION_COLUMNS
    assert tuple(weights.columns) == WEIGHT_COLUMNS
    assert iterations["peak_cached_bytes"].tolist() == [one.peak_cached_bytes for one in report.iterations]
    assert iterations["peak_cached_is_exact"].tolist() == [True, True]
    assert iterations["feature_map_bytes"].tolist() == [28, 28]
    assert weights.pivot_table(index="step", columns="name", values="bytes").loc[2].to_dict() == {
        "bias": 12,
        "weight": 48,
    }
    assert weights["shape"].tolist() == ["3x4", "3", "3x4", "3"]


def test_csv_sums_are_whole(tmp_path):
    run(tmp_path)
    iterations = pd.read_csv(tmp_path / "w.iterations.csv")
    weights = pd.read_csv(tmp_path / "w.weights.csv").groupby("step")[["bytes", "gradient_bytes"]].sum()
    assert (iterations.filter(like="at_peak_").sum(axis=1) == iterations["traced_peak_bytes"]).all()
    assert weights["bytes"].tolist() == iterations["weight_bytes"].tolist()
    assert weights["gradient_bytes"].tolist() == iterations["gradient_bytes"].tolist()


@pytest.mark.parametrize(("count", "told"), [(1, "1 iteration, 1 reported"), (2, "2 iterations, 2 reported")])
def test_an_epoch_tells_how_many_iterations_it_had(count, told):
    shown, model = io.StringIO(), nn.Linear(4, 3)
    with IterationReport(model, console=Console(file=shown, width=160)) as report:
        for _ in range(count):
            model(torch.ones(2, 4)).sum().backward()
            report.record_stats()
        report.epoch_end()
    assert f"Epoch 1: {told}; highest cached" in shown.getvalue()


def test_files_of_an_earlier_report_are_left_alone(tmp_path):
    run(tmp_path, iterations=1)
    before = (tmp_path / "w.iterations.csv").read_text()
    run(tmp_path, iterations=1)
    assert (tmp_path / "w.iterations.csv").read_text() == before
    assert len(pd.read_csv(tmp_path / "w.2.iterations.csv")) == 1


def test_what_is_not_known_is_an_empty_cell(tmp_path):
    run(tmp_path, iterations=1, model=torch.compile(nn.Linear(4, 3), backend="eager"))
    row = pd.read_csv(tmp_path / "w.iterations.csv").iloc[0]
    assert pd.isna(row["feature_map_bytes"])
    assert pd.isna(row["peak_allocated_is_exact"])
    assert row["weight_bytes"] == 60


def test_a_name_is_no_formula_and_steers_no_terminal(tmp_path):
    model = nn.Module()
    model.register_module("=cmd()\x1b[31m[red],", nn.Linear(4, 3))
    model.forward = lambda x: next(iter(model.children()))(x)
    shown = io.StringIO()
    run(tmp_path, iterations=1, model=model, console=Console(file=shown, width=160))
    assert "\x1b" not in shown.getvalue()
    assert "\\x1b[31m[red],.weight" in shown.getvalue()
    names = pd.read_csv(tmp_path / "w.weights.csv")["name"].tolist()
    assert names[0] == "'=cmd()\x1b[31m[red],.weight"


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MemPluginError, match="CSV"):
        IterationReport(nn.Linear(4, 3), csv=tmp_path / "file")


def test_only_the_largest_weights_are_printed_and_the_others_are_summed():
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    shown = io.StringIO()
    with IterationReport(model, console=Console(file=shown, width=100), max_weights=2) as report:
        report.record_stats()
    rows = [line.split() for line in shown.getvalue().splitlines()]
    assert ["0.weight", "128", "B", "0", "B"] in rows
    assert ["2", "smaller", "weights", "40", "B", "0", "B"] in rows


def test_a_note_is_printed_once():
    model: nn.Module = torch.compile(nn.Linear(4, 3), backend="eager")  # type: ignore[assignment]
    shown = io.StringIO()
    with IterationReport(model, console=Console(file=shown, width=400)) as report:
        report.record_stats()
        report.record_stats()
    assert shown.getvalue().count("note: The model is compiled ((root)).") == 1
    assert shown.getvalue().count("not known") > 2


def test_sizes_have_a_persons_units():
    assert [size(count) for count in (None, 0, 1536, -8192, 5 << 30)] == [
        "not known",
        "0 B",
        "1.50 KiB",
        "-8.00 KiB",
        "5.00 GiB",
    ]


def test_peaks_that_torch_cannot_reset_are_said_to_be_lower_bounds(tmp_path):
    reading = Reading(2, 7, exact=False, reserved=20, peak_reserved=30, reserved_exact=False)
    seen = Observation(("cuda:0",), (reading,), None, {}, ())
    memory = iteration_memory(nn.Linear(4, 3), seen, step=1, epoch=1, iteration=1, seconds=0.0)
    assert not memory.cached_is_exact
    assert not memory.allocated_is_exact
    shown = io.StringIO()
    show(memory, Console(file=shown, width=400), 5, memory.notes)
    rows = [line.split() for line in shown.getvalue().splitlines()]
    assert ["cached", "≥", "30", "B", "20", "B"] in rows
    assert ["allocated", "≥", "7", "B", "2", "B"] in rows
    assert "cannot reset the allocator's peak counters of cuda:0" in shown.getvalue()
    csv = IterationCsv(tmp_path, "w")
    csv.write(memory)
    csv.close()
    row = pd.read_csv(tmp_path / "w.iterations.csv").iloc[0]
    assert (row["peak_cached_bytes"], row["peak_cached_is_exact"]) == (30, False)
    assert (row["peak_allocated_bytes"], row["peak_allocated_is_exact"]) == (7, False)


def test_a_compiled_layer_is_named():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    model[1].compile(backend="eager")
    with IterationReport(model, console=quiet()) as report:
        model(torch.ones(2, 4)).sum().backward()
        memory: Any = report.record_stats()
    assert any("The model is compiled (1)." in note for note in memory.notes)
    assert memory.feature_map_bytes is memory.intermediate_gradient_bytes is None
