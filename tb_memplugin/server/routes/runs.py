"""`runs`: everything that can be picked, and everything that could not be read."""

from __future__ import annotations

from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.server.catalogue import Entry, Listing
from tb_memplugin.server.monitored import MonitoredRuns, Series
from tb_memplugin.server.routes.step_figures import whole_shape
from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Session
from tb_memplugin.server.shapes import Json, stats_shape


def answer(session: Session, request: Request) -> Json:
    """Asks TensorBoard anew, and looks at the files in the logdir."""
    listing = session.catalogue.listing(request.ctx, request.experiment, fresh=True)
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
                "steps": [_step(entry) for entry in entries],
                "monitored": _monitored(monitored.workers.get((run, worker))),
            }
        )
    return [{"run": run, "workers": workers} for run, workers in sorted(runs.items())]


def _monitored(series: Series | None) -> Json:
    if series is None:
        return {}
    figures = series.figures
    return {device.name: whole_shape(figures, row) for row, device in enumerate(figures.devices)}


def _step(entry: Entry) -> Json:
    devices = {device.device: stats_shape(device) for device in entry.metadata.devices}
    return {"step": entry.metadata.step, "window": entry.metadata.window, "devices": devices}


def _each_once(found: list[UnreadableFileError]) -> list[UnreadableFileError]:
    return list({(error.where, error.what): error for error in found}.values())


def _problem(error: UnreadableFileError, logdir: str) -> Json:
    where = error.where.removeprefix(logdir).lstrip("/\\") if logdir else error.where
    return {"file": where, "reason": error.what, "fix": error.fix}
