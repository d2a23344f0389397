"""`IterationReport` on a full disk, and in loops that wander from thread to thread."""

from __future__ import annotations

import io
import threading

import torch
from rich.console import Console
from torch import nn
from torch.utils import _python_dispatch as dispatch

from tb_memplugin import IterationReport
from tests import full_disk


def test_a_full_disk_is_told_in_its_own_words_and_leaves_whole_rows(tmp_path):
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
    assert said.count("The training continues") == 2  # the folder for the tab, and the CSV files
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
