"""`runs`: all runs, workers and steps, and the files that could not be read."""

from __future__ import annotations

from typing import TypedDict

from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.proto.recording_pb2 import DeviceStats
from tb_memplugin.server.catalog import Entry, Listing
from tb_memplugin.server.monitored import MonitoredRuns, Series
from tb_memplugin.server.routes.steps import MonitoredWhole, whole_shape
from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Session
from tb_memplugin.store.worker_steps import capacity_bytes, reserved_bytes


class StepColumns(TypedDict):
    """What a device has of recorded steps, as columns of equal length."""

    at: list[int]
    """Place in the worker's columns `step` and `window`."""
    peak_bytes: list[int]
    peak_time_ns: list[int]
    """The peaks, and when they were."""
    step_start_ns: list[int]
    step_end_ns: list[int]
    """When the steps ran."""
    peak_reserved_bytes: list[int | None]
    """Highest reserved bytes; null on the CPU."""
    capacity_bytes: list[int | None]
    """The memory of the device."""


class PackedSteps(TypedDict):
    """The recorded steps of a worker, as columns of equal length."""

    step: list[int]
    window: list[int]
    """Their numbers, and the windows that they are in."""
    devices: dict[str, StepColumns]
    """By name of a device."""


class PackedWorker(TypedDict):
    """A worker of a run."""

    worker: str
    """Its name."""
    devices: list[str]
    """Names of the devices that were recorded."""
    steps: PackedSteps
    """The steps that were recorded."""
    dump_of: str
    """The worker in which a request failed, if this was written then; "" for other recordings."""
    model: str
    """The same text for recordings of one model, with any number of layers; "" if it is not known."""
    monitored: dict[str, MonitoredWhole]
    """By name of a device, what a `MemoryMonitor` saw; `{}` if there was none."""


class PackedRun(TypedDict):
    """A run."""

    run: str
    """Its name."""
    end_ns: int
    """When its last recorded or watched step ended, epoch nanoseconds. The tab opens on the latest run."""
    workers: list[PackedWorker]
    """In order of their names."""


class Problem(TypedDict):
    """A file that cannot be read."""

    file: str
    reason: str
    fix: str
    """Which file, why, and what to do."""


class PackedRuns(TypedDict):
    """Everything that can be picked."""

    runs: list[PackedRun]
    """In order of their names."""
    problems: list[Problem]
    """Files that cannot be read."""
    logdir: str
    """TensorBoard's; "" with `--logdir_spec`."""


def answer(session: Session, request: Request) -> PackedRuns:
    """Answer with a new query to TensorBoard and a check of the files in the logdir."""
    listing = session.catalog.listing(request.ctx, request.experiment, fresh=True)
    monitored = session.monitored.runs(request.ctx, request.experiment, fresh=True)
    problems = [*listing.problems, *monitored.problems, *session.unreadable_files()]
    return {
        "runs": _runs(listing, monitored),
        "problems": [_problem(error, session.logdir) for error in _each_once(problems)],
        "logdir": session.logdir,
    }


def _runs(listing: Listing, monitored: MonitoredRuns) -> list[PackedRun]:
    runs: dict[str, PackedRun] = {}
    for run, worker in sorted({**listing.workers, **monitored.workers}):
        entries = listing.workers.get((run, worker), [])
        series = monitored.workers.get((run, worker))
        packed = runs.setdefault(run, {"run": run, "end_ns": 0, "workers": []})
        packed["end_ns"] = max(packed["end_ns"], _end_ns(entries, series))
        packed["workers"].append(
            {
                "worker": worker,
                "devices": list(dict.fromkeys(device for entry in entries for device in entry.devices)),
                "steps": _steps(entries),
                "dump_of": entries[-1].metadata.dump_of if entries else "",
                "model": entries[-1].metadata.model_fingerprint if entries else "",
                "monitored": _monitored(series),
            }
        )
    return [*runs.values()]


def _end_ns(entries: list[Entry], series: Series | None) -> int:
    steps = [entry.metadata for entry in entries]
    recorded = [step.epoch_ns + device.stats.step_end_ns for step in steps for device in step.devices]
    return max(recorded, default=0) if series is None else max(series.written_ns, *recorded, 0)


def _monitored(series: Series | None) -> dict[str, MonitoredWhole]:
    if series is None:
        return {}
    figures = series.figures
    return {device.name: whole_shape(figures, row) for row, device in enumerate(figures.devices)}


def _steps(entries: list[Entry]) -> PackedSteps:
    """Return steps as columns, to keep the answer small: every page loads a list of up to 20,000 steps."""
    steps = [entry.metadata for entry in entries]
    by_device: dict[str, list[tuple[int, DeviceStats]]] = {}
    for index, step in enumerate(steps):
        for device in step.devices:
            by_device.setdefault(device.device, []).append((index, device))
    return {
        "step": [step.step for step in steps],
        "window": [step.window for step in steps],
        "devices": {name: _columns(devices) for name, devices in by_device.items()},
    }


def _columns(devices: list[tuple[int, DeviceStats]]) -> StepColumns:
    return {
        "at": [index for index, _ in devices],
        "peak_bytes": [device.stats.peak_bytes for _, device in devices],
        "peak_time_ns": [device.stats.peak_time_ns for _, device in devices],
        "step_start_ns": [device.stats.step_start_ns for _, device in devices],
        "step_end_ns": [device.stats.step_end_ns for _, device in devices],
        "peak_reserved_bytes": [reserved_bytes(device) for _, device in devices],
        "capacity_bytes": [capacity_bytes(device) for _, device in devices],
    }


def _each_once(errors: list[UnreadableFileError]) -> list[UnreadableFileError]:
    return list({(error.where, error.what): error for error in errors}.values())


def _problem(error: UnreadableFileError, logdir: str) -> Problem:
    where = error.where.removeprefix(logdir).lstrip("/\\") if logdir else error.where
    return {"file": where, "reason": error.what, "fix": error.fix}
