"""`steps`: the peaks of all steps that a monitor watched, reduced to the pixel columns of a chart."""

from __future__ import annotations

from typing import TypedDict

import numpy as np

from tb_memplugin.analysis.steps import step_series
from tb_memplugin.errors import NotRecordedError
from tb_memplugin.server.monitored import Series
from tb_memplugin.server.selection import MOST_COLUMNS, Request
from tb_memplugin.server.session import Session
from tb_memplugin.trace.step_figures import StepFigures
from tb_memplugin.trace.tables import Int64

DEFAULT_COLUMNS = 1_000
MOST_MARKS = 200


class StepsAnswer(TypedDict):
    """The peaks of the steps that a monitor saw, in columns of about equally many steps."""

    count: int
    """Steps in all columns."""
    first: list[int]
    last: list[int]
    """The first and last step of each column."""
    low: list[int]
    high: list[int]
    """The lowest and highest peak of each column."""
    high_step: list[int]
    """The first step that has the highest."""
    reserved: list[int] | None
    """The highest reserved bytes of each column, or null."""
    retries: list[tuple[int, int]]
    ooms: list[tuple[int, int]]
    """Step and count of the first 200 steps that have any."""


def answer(session: Session, request: Request) -> StepsAnswer:
    """Answer from the monitor's records only."""
    series, device = requested_series(session, request)
    figures = series.figures
    first = request.number("first", int(figures.steps[0]))
    last = request.number("last", int(figures.steps[-1]))
    drawn = step_series(figures, device, first, last, request.number("px", DEFAULT_COLUMNS, 1, MOST_COLUMNS))
    device_figures = figures.devices[device]
    return {
        "count": drawn.count,
        "first": drawn.first.tolist(),
        "last": drawn.last.tolist(),
        "low": drawn.low.tolist(),
        "high": drawn.high.tolist(),
        "high_step": drawn.high_step.tolist(),
        "reserved": None if drawn.reserved is None else drawn.reserved.tolist(),
        "retries": _marks(figures.steps, device_figures.retries, first, last),
        "ooms": _marks(figures.steps, device_figures.ooms, first, last),
    }


def requested_series(session: Session, request: Request) -> tuple[Series, int]:
    """Return the series of the worker that a request names, and the row of its device.

    Raises:
        NotRecordedError: no monitor watched this worker or device.
    """
    series = session.monitored.find(
        request.ctx, request.experiment, request.text("run"), request.text("worker")
    )
    names = [device.name for device in series.figures.devices]
    device = series.figures.device_row(request.text("device", names[0]))
    if device is None:
        raise NotRecordedError(
            "No monitor watched this device.", where="device", fix=f"Choose one of: {', '.join(names)}."
        )
    return series, device


def watched_row(figures: StepFigures, step: int) -> int:
    """Return the row of a step that a monitor watched.

    Raises:
        NotRecordedError: it did not.
    """
    row = int(np.searchsorted(figures.steps, step))
    if row == len(figures) or figures.steps[row] != step:
        raise NotRecordedError(
            f"The monitor did not see step {step}.",
            where="step",
            fix=f"Choose one from {figures.steps[0]} to {figures.steps[-1]}.",
        )
    return row


def _marks(steps: Int64, counts: Int64 | None, first: int, last: int) -> list[tuple[int, int]]:
    """Return [step, count] of the first steps with a count above 0, at most `MOST_MARKS`."""
    if counts is None:
        return []
    rows = np.flatnonzero((counts > 0) & (steps >= first) & (steps <= last))[:MOST_MARKS]
    return list(zip(steps[rows].tolist(), counts[rows].tolist(), strict=True))
