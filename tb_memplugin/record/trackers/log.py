"""What `log_to=` gives the trackers of steps and windows. No error of theirs reaches the training."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec

from tb_memplugin.analysis.divisions import breakdown
from tb_memplugin.analysis.steps import step_stats
from tb_memplugin.errors import MemPluginError
from tb_memplugin.exports.formats import report_page
from tb_memplugin.record.guard import Guard, guarded
from tb_memplugin.record.steps.recording import MonitoredStep
from tb_memplugin.record.trackers.tracker import NoRunError, Tracker
from tb_memplugin.trace import MemoryTrace

TRACKERS = {"wandb": "WandbTracker", "mlflow": "MlflowTracker", "trackio": "TrackioTracker"}
"""Each tracker: the name of its library and of its file here, and its class."""

LogTo = str | Sequence[str] | None
"""A name in `TRACKERS`, several, or none."""

MOST_FAILURES = 3
"""After so many failures in a row nothing more is logged."""

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
        guard: logs errors.
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
        self._failures = 0

    @guarded("logging the figures of a step")
    def values(self, step: int, values: Callable[[], Mapping[str, float]]) -> None:
        """Log values of a step."""
        if self._works():
            self._tracker_of_run().log(step, values())
            self._failures = 0

    @guarded("logging a report")
    def report(self, trace: MemoryTrace, worker: str) -> None:
        """Log the report of a window."""
        if not self._works():
            return
        tracker, first = self._tracker_of_run(), trace.steps[0].number
        title = f"{worker}, step {first}"
        with tempfile.TemporaryDirectory(prefix="tb_memplugin-") as folder:
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
        return self._failures < MOST_FAILURES and self._pid == os.getpid()

    def _tracker_of_run(self) -> Tracker:
        if self._tracker is None:
            module = import_module(f"tb_memplugin.record.trackers.{self._name}")
            tracker: Tracker = getattr(module, TRACKERS[self._name])()
            self._tracker = tracker
        return self._tracker

    def fail(self, where: str, error: BaseException) -> None:
        """Log an error, and stop after several in a row."""
        if isinstance(error, NoRunError):  # other ranks than the first often have none; or it begins later
            error = MemPluginError(
                f"{self._name} has no run to log to: {error}.",
                where=f'log_to="{self._name}"',
                fix="Begin a run before the first step.",
            )
        else:
            self._failures += 1
        self._guard.end(where, error, loss=f"{self._name} did not get what was to be logged")


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
        stats, prefix = step_stats(trace, row)[step], f"memory/recorded/{_plain(device.name)}"
        if stats.peak_bytes:
            values[f"{prefix}/peak_bytes"] = stats.peak_bytes
            for part in breakdown(trace, row, stats.peak_event, "category"):
                values[f"{prefix}/{part.key}_bytes"] = part.bytes
    return values


def _plain(device: str) -> str:
    """Return a device's name without a colon, which not every tracker takes: `cuda0`."""
    return device.replace(":", "")
