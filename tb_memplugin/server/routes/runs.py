"""`runs`: everything that can be picked, and everything that could not be read."""

from __future__ import annotations

from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.server.catalogue import Entry, Listing
from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Session
from tb_memplugin.server.shapes import Json, stats_shape


def answer(session: Session, request: Request) -> Json:
    """Asks TensorBoard anew, and looks at the files in the logdir."""
    listing = session.catalogue.listing(request.ctx, request.experiment, fresh=True)
    return {
        "runs": _runs(listing),
        "problems": [_problem(error, session.logdir) for error in _problems(session, listing)],
        "logdir": session.logdir,
    }


def _runs(listing: Listing) -> list[Json]:
    runs: dict[str, list[Json]] = {}
    for (run, worker), entries in listing.workers.items():
        runs.setdefault(run, []).append(
            {
                "worker": worker,
                "devices": list(dict.fromkeys(device for entry in entries for device in entry.devices)),
                "steps": [_step(entry) for entry in entries],
            }
        )
    return [{"run": run, "workers": workers} for run, workers in sorted(runs.items())]


def _step(entry: Entry) -> Json:
    devices = {device.device: stats_shape(device) for device in entry.metadata.devices}
    return {"step": entry.metadata.step, "window": entry.metadata.window, "devices": devices}


def _problems(session: Session, listing: Listing) -> list[UnreadableFileError]:
    found = [*listing.problems, *session.unreadable_files()]
    return list({(error.where, error.what): error for error in found}.values())


def _problem(error: UnreadableFileError, logdir: str) -> Json:
    where = error.where.removeprefix(logdir).lstrip("/\\") if logdir else error.where
    return {"file": where, "reason": error.what, "fix": error.fix}
