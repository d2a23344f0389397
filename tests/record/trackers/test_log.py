"""`log_to=`: what the real trackers have afterwards, and that no error of theirs reaches the training."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import profile

from tb_memplugin import MemoryMonitor, memory_trace_handler
from tb_memplugin.errors import MemPluginError
from tb_memplugin.record import trackers as log_module
from tb_memplugin.record.guard import Guard
from tb_memplugin.record.steps.recording import MonitoredStep
from tb_memplugin.record.trackers import MOST_FAILURES, TrackerLog, WandbTracker, chosen
from tests.record.trackers.program import STEPS
from tests.record.trackers.wandb_store import records
from tests.traces import trace

ROOT = Path(__file__).parents[3]
TWO_STEPS = trace(
    "start 400 w category=parameter",
    "step 5",
    "alloc 100 a category=activation",
    "step 6",
    "alloc 30 b category=gradient",
    "free a",
)


def logged(tracker: str, folder: Path) -> dict[str, Any]:
    pytest.importorskip(tracker)
    subprocess.run(
        [sys.executable, "-m", "tests.record.trackers.program", tracker, str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=300,
    )
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def files_with(text: bytes, folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and text in path.read_bytes()]


def parts_of(values: Mapping[str, float]) -> tuple[float, float]:
    """The peak of a recorded step, and the sum of its categories."""
    prefix = "memory/recorded/cpu/"
    own = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
    peak = own.pop("peak_bytes")
    own.pop("highest_peak_bytes", None)
    return peak, sum(own.values())


def test_wandb_has_the_peaks_in_the_rows_of_the_program(tmp_path: Path) -> None:
    result = logged("wandb", tmp_path)
    values, peaks = result["values"], [step["process"] for step in result["steps"]]
    assert result["own"] == STEPS / 2  # as many rows as the program logged
    assert (values["loss"], values["memory/step"], values["memory/recorded/step"]) == (8, 8, 3)
    assert values["memory/process/peak_bytes"] == peaks[8]
    assert values["memory/process/highest_peak_bytes"] == max(peaks[:9])
    peak, parts = parts_of(values)
    assert peak == parts > 2 * 4 * 100 * 101  # the parameters and their gradients
    assert files_with(b'id="report-data"', tmp_path)


def test_the_store_of_wandb_has_the_peak_of_the_step_of_each_row_and_the_report(tmp_path: Path) -> None:
    """What `wandb sync` would send: one record per row, and one per artifact."""
    result = logged("wandb", tmp_path)
    (store,) = tmp_path.rglob("*.wandb")
    stored = [*records(store)]
    rows = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in stored
        if record.HasField("history")
    ]
    peaks = [step["process"] for step in result["steps"]]
    assert [(row.get("loss"), row["memory/step"], row["memory/process/peak_bytes"]) for row in rows] == [
        *((step, step, peaks[step]) for step in range(0, STEPS, 2)),
        (None, STEPS - 1, peaks[-1]),  # W&B ends the last row when the run ends
    ]
    (artifact,) = [record.artifact for record in stored if record.HasField("artifact")]
    assert artifact.type == "memory-report"
    assert [content.path for content in artifact.manifest.contents] == ["memory-step-2.html"]


def test_mlflow_has_the_peak_of_every_step(tmp_path: Path) -> None:
    result = logged("mlflow", tmp_path)
    values = {name: dict(map(tuple, rows)) for name, rows in result["values"].items()}
    assert values["memory/process/peak_bytes"] == {
        number: step["process"] for number, step in enumerate(result["steps"])
    }
    assert result["own"] == [[number, number] for number in range(0, STEPS, 2)]
    for step in (2, 3):
        peak, parts = parts_of({name: rows[step] for name, rows in values.items() if step in rows})
        assert peak == parts
    (report,) = files_with(b'id="report-data"', tmp_path)
    assert report.name == "memory-step-2.html"


def test_trackio_has_the_peak_of_every_step_beside_the_programs_own(tmp_path: Path) -> None:
    result = logged("trackio", tmp_path)
    peaks = {row["memory/step"]: row.get("memory/process/peak_bytes") for row in result["values"]}
    monitored = [row for row in result["values"] if "memory/process/peak_bytes" in row]
    assert [(row["memory/step"], row["memory/process/peak_bytes"]) for row in monitored] == [
        (number, step["process"]) for number, step in enumerate(result["steps"])
    ]
    assert len(peaks) == STEPS
    assert result["own"] == [[row, 2 * row] for row in range(STEPS // 2)]  # numbered as without us
    recorded = [row for row in result["values"] if "memory/recorded/cpu/peak_bytes" in row]
    assert [row["memory/step"] for row in recorded] == [2, 3]
    assert all(peak == parts for peak, parts in map(parts_of, recorded))
    assert files_with(b'id="report-data"', tmp_path)


class Kept:
    """A tracker that keeps what it gets, or raises."""

    raises: type[BaseException] | None = None

    def __init__(self) -> None:
        self.calls = KEPT
        self._call("found", 0)

    def _call(self, what: str, value: Any) -> None:
        self.calls.append((what, value))
        if self.raises is not None:
            raise self.raises("the tracker is down")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._call("log", (step, dict(values)))

    def flush(self) -> None:
        self._call("flush", 0)

    def log_report(self, path: str, name: str) -> None:
        self._call("report", (name, "report-data" in Path(path).read_text("utf-8")))


KEPT: list[tuple[str, Any]] = []


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """A tracker `kept`, whose library is installed."""
    KEPT.clear()
    monkeypatch.setattr(Kept, "raises", None)
    monkeypatch.setitem(log_module.TRACKERS, "kept", Kept)
    monkeypatch.setattr(log_module, "find_spec", lambda _: object())
    return KEPT


def test_a_window_gives_the_peak_of_each_step_and_its_parts(kept: list[tuple[str, Any]]) -> None:
    TrackerLog(["kept"], Guard("lost")).window(TWO_STEPS, "w")
    prefix = "memory/recorded/cpu"
    parts = {f"{prefix}/parameter_bytes": 400, f"{prefix}/activation_bytes": 100}
    assert kept == [
        ("found", 0),
        ("log", (5, {f"{prefix}/peak_bytes": 500, **parts})),
        ("log", (6, {f"{prefix}/peak_bytes": 530, **parts, f"{prefix}/gradient_bytes": 30})),
        ("report", ("memory-step-5.html", True)),
        ("flush", 0),
    ]


def test_a_failing_tracker_is_told_once_and_left_alone_after_three_failures(
    kept: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Kept, "raises", OSError)
    log = TrackerLog(["kept"], Guard("lost"))
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            log.window(TWO_STEPS, "w")
    assert len(kept) == MOST_FAILURES
    assert len(caplog.records) == 1
    assert "kept did not get what was to be logged (OSError: the tracker is down)" in caplog.text


def test_a_failing_tracker_is_told_once_by_handler_and_monitor_whatever_fails(
    kept: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As MLflow on a full disk, which refuses a report in one line and figures in another."""

    def fail(*_: object) -> None:
        raise OSError("full")

    def fail_elsewhere(*_: object) -> None:
        raise RuntimeError("full")

    monkeypatch.setattr(Kept, "log_report", fail)
    monkeypatch.setattr(Kept, "flush", fail_elsewhere)
    handler, monitor = TrackerLog(["kept"], Guard("a window")), TrackerLog(["kept"], Guard("a step"))
    with caplog.at_level(logging.WARNING):
        handler.window(TWO_STEPS, "w")
        monitor.flush()
        monitor.step(MonitoredStep(0, 1, (), ()))
        monitor.flush()
    assert [record.message.partition(" (")[0] for record in caplog.records] == [
        "kept did not get what was to be logged"
    ]


def test_a_tracker_that_is_slow_three_steps_in_a_row_is_left_alone(
    kept: list[tuple[str, Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seconds = iter([2.0, 2.0, 0.0, 2.0, 2.0, 2.0, 2.0])
    now = 0.0

    def log(*_: object) -> None:
        nonlocal now
        now += next(seconds)

    monkeypatch.setattr(Kept, "log", log)
    monkeypatch.setattr("tb_memplugin.record.trackers.time.monotonic", lambda: now)
    monitor = TrackerLog(["kept"], Guard("lost"))
    with caplog.at_level(logging.WARNING):
        for step in range(10):
            monitor.step(MonitoredStep(step, 1, (), ()))
    assert [*seconds] == [2.0]  # nothing was logged after the sixth step
    assert [record.message.splitlines()[0] for record in caplog.records] == [
        "kept took 2.0 s to take the figures of a step, and over 1 s in the 2 before. It gets nothing more."
    ]


def test_a_row_of_wandb_has_the_parts_of_one_recorded_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """W&B merges what is logged before the program's next row: here, that of steps 5 and 6."""
    row: dict[str, float] = {}

    class Run:
        def define_metric(self, *_: object, **__: object) -> None: ...

        def log(self, values: Mapping[str, float], *, commit: bool) -> None:
            assert not commit
            row.update(values)

    monkeypatch.setattr(log_module, "library", lambda *_: SimpleNamespace(run=Run()))
    monkeypatch.setitem(log_module.TRACKERS, "kept", WandbTracker)
    recorded = trace(
        "step 5", "alloc 100 a category=input", "free a", "step 6", "alloc 30 b category=gradient"
    )
    monkeypatch.setattr(WandbTracker, "log_report", lambda *_: None)
    TrackerLog(["kept"], Guard("lost")).window(recorded, "w")
    assert row == {
        "memory/recorded/step": 6,
        "memory/recorded/cpu/peak_bytes": 30,
        "memory/recorded/cpu/highest_peak_bytes": 100,
        "memory/recorded/cpu/input_bytes": 0,
        "memory/recorded/cpu/gradient_bytes": 30,
    }


@pytest.mark.parametrize("where", ["__init__", "log", "flush", "log_report"])
def test_the_training_and_our_own_recording_go_on_without_the_tracker(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no")

    monkeypatch.setattr(Kept, where, fail)
    handler = memory_trace_handler(tmp_path, "w", log_to="kept")
    monitor = MemoryMonitor(tmp_path, "w", log_to=["kept"])
    with profile(profile_memory=True, on_trace_ready=handler):
        kept_alive = torch.ones(100) + 1
        step = monitor.step()
    monitor.close()
    assert step is not None
    assert kept_alive.sum() == 200
    assert list(tmp_path.rglob("window-*.mem"))


def test_what_ends_the_program_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kept, "raises", KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        TrackerLog(["kept"], Guard("lost")).window(TWO_STEPS, "w")


def test_a_run_that_was_not_begun_is_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tb_memplugin.record.trackers import NoRunError

    def fail(*_: object) -> None:
        raise NoRunError("kept.init() was not called")

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING):
        patched.setattr(Kept, "__init__", fail)
        log = TrackerLog(["kept"], Guard("lost"))
        for _ in range(5):
            log.window(TWO_STEPS, "w")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "kept has no run to log to: kept.init() was not called." in caplog.text
    log.window(TWO_STEPS, "w")  # the program begins its run later
    assert ("found", 0) in KEPT


def test_unknown_and_absent_trackers_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(MemPluginError, match="There is no tracker 'comet'"):
        memory_trace_handler(tmp_path, log_to="comet")
    monkeypatch.setattr(log_module, "find_spec", lambda _: None)
    with pytest.raises(MemPluginError, match=r"tb-memplugin\[wandb\]"):
        MemoryMonitor(tmp_path, log_to="wandb")
    assert chosen(None) == ()


def test_a_program_that_is_run_logs_to_its_own_tracker(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    script = tmp_path / "train.py"
    script.write_text(
        "import mlflow, torch\n"
        "net = torch.nn.Linear(10, 10)\n"
        "optimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        f"mlflow.set_tracking_uri('file://{tmp_path}/mlruns')\n"
        "with mlflow.start_run():\n"
        "    for _ in range(6):\n"
        "        net(torch.ones(2, 10)).sum().backward()\n"
        "        optimizer.step()\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "tb_memplugin", "run", "--log-to", "mlflow", str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "MLFLOW_ALLOW_FILE_STORE": "true"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    peaks = next(tmp_path.rglob("metrics/memory/process/peak_bytes")).read_text().split("\n")[:-1]
    assert [int(line.split()[2]) for line in peaks] == [1, 2, 3, 4, 5]  # step 0 has no figures
    assert [path.name for path in tmp_path.rglob("artifacts/memory/*")] == ["memory-step-2.html"]
