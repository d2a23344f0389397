"""Trackio."""

from __future__ import annotations

from collections.abc import Mapping

from tb_memplugin.extras import library
from tb_memplugin.record.trackers.tracker import NoRunError


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
