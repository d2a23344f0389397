"""`IterationReport` on a full disk, and in loops that wander from thread to thread."""

from __future__ import annotations

import io
import threading
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn
from torch.utils import _python_dispatch as dispatch

from tb_memplugin import IterationReport
from tb_memplugin.record.iterations.figures import Observation, iteration_memory
from tb_memplugin.record.iterations.report import IterationCsv
from tb_memplugin.record.steps.counters import Reading
from tests import full_disk


def test_a_full_disk_is_told_once_and_leaves_whole_rows(tmp_path):
    code = """
import io, torch
from rich.console import Console
from tb_memplugin import IterationReport
model = torch.nn.Linear(4, 3)
report = IterationReport(model, csv=FOLDER + "/csv", logdir=FOLDER + "/log", worker_name="w",
                         console=Console(file=io.StringIO()))
for iteration in range(6):
    if iteration == 2: fill(700)
    if iteration == 5: free()
    model(torch.ones(2, 4)).sum().backward()
    report.record_stats()
report.close()
"""
    said = full_disk.run(code, str(tmp_path)).stderr
    assert "report it" not in said
    assert said.count("fix: Free some disk space") == 1  # of the CSV files, and those for the tab
    assert f"where: {tmp_path}" in said
    rows = {
        path.name: [line.split(",") for line in path.read_text().splitlines()]
        for path in (tmp_path / "csv").iterdir()
    }
    assert all(len(row) == len(table[0]) for table in rows.values() for row in table)
    steps = [int(row[0]) for row in rows["w.iterations.csv"][1:]]
    assert steps[:1] + steps[-1:] == [1, 6]
    assert sorted({int(row[0]) for row in rows["w.weights.csv"][1:]}) == steps


def test_iterations_that_end_on_other_threads_leave_nothing_on_the_first():
    model = nn.Linear(4, 3)
    report = IterationReport(model, console=Console(file=io.StringIO()))

    def iteration():
        model(torch.ones(2, 4)).sum().backward()
        report.record_stats()

    for _ in range(3):
        thread = threading.Thread(target=iteration)
        thread.start()
        thread.join()
        iteration()
    report.close()
    assert not dispatch._get_current_dispatch_mode_stack()


def test_rows_that_could_not_be_taken_back_are_taken_back_later(tmp_path):
    class Failing:
        """The second file: while it fails, a write leaves half of its bytes, and nothing can be cut."""

        def __init__(self, file):
            self.file, self.fails = file, False

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, text):
            if not self.fails:
                return self.file.write(text)
            self.file.write(text[: len(text) // 2])
            raise OSError(5, "Input/output error")

        def truncate(self):
            if self.fails:
                raise OSError(5, "Input/output error")
            return self.file.truncate()

    reading = Reading(2, 7, exact=False, reserved=20, peak_reserved=30, reserved_exact=False)
    seen = Observation(("cuda:0",), (reading,), None, {}, ())
    memory = iteration_memory(nn.Linear(4, 3), seen, step=1, epoch=1, iteration=1, seconds=0.0)
    csv: Any = IterationCsv(tmp_path, "w")
    csv.write(memory)
    expected = {path.name: len(path.read_bytes()) for path in csv.paths}
    second = Failing(csv._files[1])
    csv._files = (csv._files[0], second)
    second.fails = True
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output"):
            csv.write(memory)
    second.fails = False
    csv.close()
    assert {path.name: len(path.read_bytes()) for path in tmp_path.iterdir()} == expected
