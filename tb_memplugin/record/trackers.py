"""`log_to=`: figures of steps and reports in the experiment trackers that a program uses already.

No error of theirs reaches the training.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Protocol

from tb_memplugin.analysis.divisions import breakdown
from tb_memplugin.analysis.steps import step_stats
from tb_memplugin.errors import MemPluginError
from tb_memplugin.exports.html import report_page
from tb_memplugin.extras import library
from tb_memplugin.record.guard import TRACKER, Guard, guarded
from tb_memplugin.record.steps.recording import MonitoredStep
from tb_memplugin.temporary import new_folder
from tb_memplugin.trace import MemoryTrace


class Tracker(Protocol):
    """A run of an experiment tracker that the program has begun. Any method may raise anything.

    A tracker is made when there is something to log, on the thread of the training.
    """

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of a step, without a change to the numbers of the program's own steps."""

    def flush(self) -> None:
        """Pass on what waits."""

    def log_report(self, path: str, name: str) -> None:
        """Keep a file as an artifact. The file is deleted afterwards."""


class NoRunError(Exception):
    """The program has begun no run of this tracker."""


PEAK = "/peak_bytes"

RECORDED = "memory/recorded"
"""What the names of a recorded step's values begin with."""


class WandbTracker:
    """The run of `wandb.init`.

    W&B counts its steps by calls of `log`. So that the program's keep their numbers, ours does not end one:
    the values are in the row that the program logs next. Those of earlier steps since its last row are lost,
    but for the highest peak of all steps so far. (Which row comes next is not asked for: that waits for W&B's
    process.)

    Raises:
        NoRunError: there is no run.
    """

    def __init__(self) -> None:
        self._wandb = library("wandb", "wandb")
        self._run: Any = self._wandb.run
        if self._run is None:
            raise NoRunError("wandb.init() was not called")
        for names in ("memory", RECORDED):
            self._run.define_metric(f"{names}/*", step_metric=f"{names}/step")
        self._highest: dict[str, float] = {}
        self._zeros: dict[str, float] = {}  # else a part of an earlier step stays in the row of a later one

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values in the row that comes next."""
        for name, value in values.items():
            if name.endswith(PEAK):
                highest = f"{name.removesuffix(PEAK)}/highest_peak_bytes"
                self._highest[highest] = max(value, self._highest.get(highest, value))
        is_recorded = any(name.startswith(RECORDED) for name in values)
        if is_recorded:
            values = {**self._zeros, **values}
            self._zeros = dict.fromkeys(values, 0)
        names = RECORDED if is_recorded else "memory"
        self._run.log({**values, **self._highest, f"{names}/step": step}, commit=False)

    def flush(self) -> None:
        """Do nothing: nothing waits here."""

    def log_report(self, path: str, name: str) -> None:
        """Log the file as an artifact of the type `memory-report`. W&B copies it and sends the copy later."""
        artifact = self._wandb.Artifact(f"memory-report-{self._run.id}", type="memory-report")
        artifact.add_file(path, name=name)
        self._run.log_artifact(artifact)


FOLDER = "memory"
"""Where reports are among the run's artifacts."""

MOST_SECONDS, MOST_METRICS = 10, 900
"""After so many seconds, or so many metrics, those that wait are sent; MLflow takes up to 1,000 at once."""


class MlflowTracker:
    """The active run of the thread that trains.

    Each call of MLflow starts work in a thread, which slows a short step. So metrics are sent together.

    Raises:
        NoRunError: there is none.
    """

    def __init__(self) -> None:
        self._mlflow = library("mlflow", "mlflow")
        self._metric: Any = library("mlflow.entities", "mlflow").Metric
        run = self._mlflow.active_run()
        if run is None:
            raise NoRunError("mlflow.start_run() was not called on this thread")
        self._run_id = run.info.run_id
        self._client = self._mlflow.MlflowClient()
        self._waiting: list[Any] = []
        self._sent = time.monotonic()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values under their step, at the latest with those of ten seconds later."""
        now_ms = time.time_ns() // 1_000_000
        self._waiting += [self._metric(name, value, now_ms, step) for name, value in values.items()]
        if len(self._waiting) >= MOST_METRICS or time.monotonic() - self._sent >= MOST_SECONDS:
            self._send(synchronous=False)

    def flush(self) -> None:
        """Send what waits, and wait for it: at the end of a process no thread of MLflow starts."""
        self._send(synchronous=True)

    def _send(self, *, synchronous: bool) -> None:
        waiting, self._waiting, self._sent = self._waiting, [], time.monotonic()
        for first in range(0, len(waiting), MOST_METRICS):
            batch = waiting[first : first + MOST_METRICS]
            self._client.log_batch(self._run_id, metrics=batch, synchronous=synchronous)

    def log_report(self, path: str, name: str) -> None:  # noqa: ARG002  # MLflow takes the file's own name
        """Log the file as an artifact, in the folder `memory`."""
        self._client.log_artifact(self._run_id, path, FOLDER)


class TrackioTracker:
    """The run of `trackio.init`.

    A step that is given to `trackio.log` moves those of the program's own calls. So values are system
    metrics, which have a time in place of a step, and the step is one of them.

    Raises:
        NoRunError: there is none.
    """

    def __init__(self) -> None:
        self._trackio = library("trackio", "trackio")
        self._run = library("trackio.context_vars", "trackio").current_run.get()
        if self._run is None:
            raise NoRunError("trackio.init() was not called")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values as system metrics. A thread of Trackio writes them."""
        self._run.log_system({**values, "memory/step": step})

    def flush(self) -> None:
        """Do nothing: nothing waits here."""

    def log_report(self, path: str, name: str) -> None:
        """Log the file as an artifact of the type `memory-report`."""
        artifact = self._trackio.Artifact(name=f"memory-report-{self._run.name}", type="memory-report")
        artifact.add_file(path, name=name)
        self._run.log_artifact(artifact)


TRACKERS: dict[str, Callable[[], Tracker]] = {
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "trackio": TrackioTracker,
}
"""Each tracker by the name of its library."""

LogTo = str | Sequence[str] | None
"""A name in `TRACKERS`, several, or none."""

MOST_FAILURES = 3
"""After so many failures in a row nothing more is logged, and after so many slow steps."""

SLOW_SECONDS = 1.0
"""A step is slow if its figures take a tracker longer: the training waits for that."""

MOST_EVENTS = 500_000
"""A window of more events has no report, which takes about four bytes per event."""


def chosen(log_to: LogTo) -> tuple[str, ...]:
    """Return the names of the trackers in an argument `log_to`.

    Raises:
        MemPluginError: there is no such tracker, or its library is not installed.
    """
    names = (log_to,) if isinstance(log_to, str) else tuple(log_to or ())
    for name in names:
        if name not in TRACKERS:
            choices = ", ".join(TRACKERS)
            raise MemPluginError(
                f"There is no tracker {name!r:.80}.", where="log_to", fix=f"Choose one of: {choices}."
            )
        if find_spec(name) is None:
            raise MemPluginError(
                f"{name} is not installed.", where="log_to", fix=f"Run: pip install 'tb-memplugin[{name}]'"
            )
    return names


class TrackerLog:
    """Passes figures and reports to trackers, on the thread that trains.

    Args:
        names: names in `TRACKERS`.
    """

    def __init__(self, names: Sequence[str], guard: Guard) -> None:
        self._logs = [_OneLog(name, guard) for name in names]

    def step(self, step: MonitoredStep) -> None:
        """Log the peaks and ends of a monitored step, by device."""
        for log in self._logs:
            log.values(step.step, lambda: _monitored(step))

    def window(self, trace: MemoryTrace, worker: str) -> None:
        """Log the peak of each recorded step by device and category, and the report of the window."""
        for log in self._logs:
            for row, step in enumerate(trace.steps):
                log.values(step.number, lambda row=row: _recorded(trace, row))  # type: ignore[misc]  # bound at once
            if len(trace.events) <= MOST_EVENTS:
                log.report(trace, worker)
        self.flush()

    def flush(self) -> None:
        """Pass on what waits in the trackers."""
        for log in self._logs:
            log.flush()


class _OneLog:
    """One tracker, made when there is something to log."""

    def __init__(self, name: str, guard: Guard) -> None:
        self._name, self._guard = name, guard
        self._tracker: Tracker | None = None
        self._pid = os.getpid()
        self._failures = self._slow = 0

    @guarded("logging the figures of a step")
    def values(self, step: int, values: Callable[[], Mapping[str, float]]) -> None:
        """Log values of a step."""
        if self._works():
            tracker, now = self._tracker_of_run(), values()
            begin = time.monotonic()
            tracker.log(step, now)
            seconds, self._failures = time.monotonic() - begin, 0
            self._slow = self._slow + 1 if seconds > SLOW_SECONDS else 0
            if self._slow == MOST_FAILURES:
                raise MemPluginError(
                    f"{self._name} took {seconds:.1f} s to take the figures of a step, and over "
                    f"{SLOW_SECONDS:.0f} s in the {MOST_FAILURES - 1} before. It gets nothing more.",
                    where=f'log_to="{self._name}"',
                    fix=f"See why {self._name} is slow, or leave out log_to.",
                )

    @guarded("logging a report")
    def report(self, trace: MemoryTrace, worker: str) -> None:
        """Log the report of a window."""
        if not self._works():
            return
        tracker, first = self._tracker_of_run(), trace.steps[0].number
        title = f"{worker}, step {first}"
        with new_folder() as folder:
            name = f"memory-step-{first}.html"
            path = os.path.join(folder, name)  # noqa: PTH118  # trackers take text
            with open(path, "w", encoding="utf-8") as stream:  # noqa: PTH123  # as above
                stream.write(report_page(trace, title))
            tracker.log_report(path, name)

    @guarded("passing figures on")
    def flush(self) -> None:
        """Pass on what waits."""
        if self._works() and self._tracker is not None:
            self._tracker.flush()

    def _works(self) -> bool:
        return max(self._failures, self._slow) < MOST_FAILURES and self._pid == os.getpid()

    def _tracker_of_run(self) -> Tracker:
        if self._tracker is None:
            self._tracker = TRACKERS[self._name]()
        return self._tracker

    def fail(self, where: str, error: BaseException) -> None:
        """Log the first error, and stop after several in a row."""
        kind = f"{TRACKER} {self._name}"
        if isinstance(error, NoRunError):  # other ranks than the first often have none; or it begins later
            error = MemPluginError(
                f"{self._name} has no run to log to: {error}.",
                where=f'log_to="{self._name}"',
                fix="Begin a run before the first step.",
            )
            kind += " without a run"
        else:
            self._failures += 1
        self._guard.end(where, error, loss=f"{self._name} did not get what was to be logged", once=kind)


def _monitored(step: MonitoredStep) -> dict[str, float]:
    values: dict[str, float] = {}
    for device in step.devices:
        values[f"memory/{_plain(device.device)}/peak_bytes"] = device.peak_allocated
        values[f"memory/{_plain(device.device)}/end_bytes"] = device.allocated
        if device.peak_reserved is not None:
            values[f"memory/{_plain(device.device)}/peak_reserved_bytes"] = device.peak_reserved
    return values


def _recorded(trace: MemoryTrace, step: int) -> dict[str, float]:
    """Return the peak of a step (its row) on each device, and its parts by category, which sum to it."""
    values: dict[str, float] = {}
    for row, device in enumerate(trace.devices):
        stats, prefix = step_stats(trace, row)[step], f"{RECORDED}/{_plain(device.name)}"
        if stats.peak_bytes:
            values[f"{prefix}/peak_bytes"] = stats.peak_bytes
            for part in breakdown(trace, row, stats.peak_event, "category"):
                values[f"{prefix}/{part.key}_bytes"] = part.bytes
    return values


def _plain(device: str) -> str:
    """Return a device's name without a colon, which not every tracker takes: `cuda0`."""
    return device.replace(":", "")
