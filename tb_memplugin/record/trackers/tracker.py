"""What a tracker can do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


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
