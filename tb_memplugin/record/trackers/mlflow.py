"""MLflow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from tb_memplugin.extras import library
from tb_memplugin.record.trackers.tracker import NoRunError

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
