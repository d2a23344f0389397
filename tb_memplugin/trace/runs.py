"""The lowest and highest of each run of values, so that those of a long range need no look at all of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

Number = TypeVar("Number", np.int64, np.float64)

RUN = 64
"""How many values a run has."""


@dataclass(frozen=True, slots=True)
class Runs(Generic[Number]):
    """The lowest and highest of each `RUN` values of a level: shape (n // RUN,), dtype of the level."""

    low: npt.NDArray[Number]
    high: npt.NDArray[Number]


def runs_of(level: npt.NDArray[Number]) -> Runs[Number]:
    """Return the runs of a level, shape (n,); the last values that fill no run are in none."""
    full_runs = level[: len(level) // RUN * RUN].reshape(-1, RUN)
    return Runs(full_runs.min(axis=1), full_runs.max(axis=1))
