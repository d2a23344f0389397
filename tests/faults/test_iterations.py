"""No error of an iteration report or of the callbacks' recorder reaches the training."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from tb_memplugin import IterationReport
from tests.faults.sweep import Session, Training, sweep


class ReportSession(Session):
    """A report of every iteration. What it returns is compared, without times."""

    boundary = (
        "record/tracer/mode.py:__torch_dispatch__",
        "record/tracer/mode.py:_should_skip_dynamo",
        "record/tracer/kernels.py:run",
        "record/tracer/recording.py:see_memory",
        "record/tracer/recording.py:_get_rng_state",
        "record/tracer/recording.py:_report",
        "record/iterations/figures.py:note",
    )
    second_warning = (  # the folder stays claimed, another one is used
        "store/worker_folder.py:__init__",
    )

    def __init__(self, folder: Path, training: Training) -> None:
        super().__init__(folder, training)
        console = Console(file=io.StringIO())
        self.report = IterationReport(
            training.model, optimizer=training.optimizer, console=console, csv=folder / "csv", logdir=folder
        )

    def window(self) -> None:
        try:
            self.training.step()
        finally:
            memory = self.report.record_stats()
        if memory is not None and memory.iteration > 0:
            self.windows.append([(one.name, one.bytes, one.gradient_bytes) for one in memory.weights])

    def close(self) -> None:
        self.report.close()
        del self.report


def test_an_error_in_any_function_costs_at_most_that_iteration(tmp_path):
    fired, problems = sweep(ReportSession, tmp_path)
    assert problems == []
    assert fired > 100


class Broken(io.StringIO):
    """An output that a signal interrupts, or whose reader has ended."""

    def write(self, _: str) -> int:
        if self.signal:
            signal.raise_signal(self.signal)
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    signal = 0


def time_is_over(*_: object) -> None:
    raise TimeoutError("time is over")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signal")
def test_what_a_signal_handler_raises_while_a_report_is_printed_reaches_the_program():
    model, output = nn.Linear(2, 2), Broken()
    output.signal = signal.SIGUSR1
    before = signal.signal(signal.SIGUSR1, time_is_over)
    report = IterationReport(model, console=Console(file=output))
    try:
        model(torch.ones(1, 2))
        with pytest.raises(TimeoutError, match="time is over"):
            report.record_stats()
    finally:
        signal.signal(signal.SIGUSR1, before)
        report.close()


def test_an_output_that_nobody_reads_is_told_once(caplog, monkeypatch):
    monkeypatch.setattr(Console, "on_broken_pipe", lambda _: sys.exit(1))  # rich's own replaces stdout
    model = nn.Linear(2, 2)
    with IterationReport(model, console=Console(file=Broken())) as report:
        for _ in range(2):
            model(torch.ones(1, 2))
            assert report.record_stats() is not None
    (message,) = [record.getMessage() for record in caplog.records if record.name == "tb_memplugin"]
    assert message.startswith("The report of an iteration is not complete (BrokenPipeError: ")
