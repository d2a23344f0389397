"""`runs`: all runs, workers and steps, and the files that could not be read."""

from __future__ import annotations

from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.proto.metadata_pb2 import DeviceStats
from tb_memplugin.server.catalog import Entry, Listing
from tb_memplugin.server.monitored import MonitoredRuns, Series
from tb_memplugin.server.routes.step_figures import whole_shape
from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Session
from tb_memplugin.server.shapes import Json, capacity_bytes, reserved_bytes


def answer(session: Session, request: Request) -> Json:
    """Answer with a new query to TensorBoard and a check of the files in the logdir."""
    listing = session.catalog.listing(request.ctx, request.experiment, fresh=True)
    monitored = session.monitored.runs(request.ctx, request.experiment, fresh=True)
    problems = [*listing.problems, *monitored.problems, *session.unreadable_files()]
    return {
        "runs": _runs(listing, monitored),
        "problems": [_problem(error, session.logdir) for error in _each_once(problems)],
        "logdir": session.logdir,
    }


def _runs(listing: Listing, monitored: MonitoredRuns) -> list[Json]:
    runs: dict[str, list[Json]] = {}
    for run, worker in sorted({**listing.workers, **monitored.workers}):
        entries = listing.workers.get((run, worker), [])
        runs.setdefault(run, []).append(
            {
                "worker": worker,
                "devices": list(dict.fromkeys(device for entry in entries for device in entry.devices)),
                "steps": _steps(entries),
                "monitored": _monitored(monitored.workers.get((run, worker))),
            }
        )
    return [{"run": run, "workers": workers} for run, workers in sorted(runs.items())]


def _monitored(series: Series | None) -> Json:
    if series is None:
        return {}
    figures = series.figures
    return {device.name: whole_shape(figures, row) for row, device in enumerate(figures.devices)}


def _steps(entries: list[Entry]) -> Json:
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


def _columns(devices: list[tuple[int, DeviceStats]]) -> Json:
    columns: Json = {
        name: [getattr(device.stats, name) for _, device in devices]
        for name in ("peak_bytes", "peak_time_ns", "step_start_ns", "step_end_ns")
    }
    columns["peak_reserved_bytes"] = [reserved_bytes(device) for _, device in devices]
    columns["capacity_bytes"] = [capacity_bytes(device) for _, device in devices]
    return {"at": [index for index, _ in devices], **columns}


def _each_once(errors: list[UnreadableFileError]) -> list[UnreadableFileError]:
    return list({(error.where, error.what): error for error in errors}.values())


def _problem(error: UnreadableFileError, logdir: str) -> Json:
    where = error.where.removeprefix(logdir).lstrip("/\\") if logdir else error.where
    return {"file": where, "reason": error.what, "fix": error.fix}
