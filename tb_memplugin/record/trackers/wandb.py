"""Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tb_memplugin.extras import library
from tb_memplugin.record.trackers.tracker import NoRunError

PEAK = "/peak_bytes"


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
        self._run.define_metric("memory/*", step_metric="memory/step")
        self._highest: dict[str, float] = {}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values in the row that comes next."""
        for name, value in values.items():
            if name.endswith(PEAK):
                highest = f"{name.removesuffix(PEAK)}/highest_peak_bytes"
                self._highest[highest] = max(value, self._highest.get(highest, value))
        self._run.log({**values, **self._highest, "memory/step": step}, commit=False)

    def flush(self) -> None:
        """Do nothing: nothing waits here."""

    def log_report(self, path: str, name: str) -> None:
        """Log the file as an artifact of the type `memory-report`. W&B copies it and sends the copy later."""
        artifact = self._wandb.Artifact(f"memory-report-{self._run.id}", type="memory-report")
        artifact.add_file(path, name=name)
        self._run.log_artifact(artifact)
