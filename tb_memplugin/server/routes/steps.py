"""`steps`: the peaks of all steps that a monitor watched, reduced to the pixel columns of a chart.

`step_figures`: everything that a monitor recorded of one step, and a summary of its run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

import numpy as np

from tb_memplugin.analysis.steps import StepSeries, step_series
from tb_memplugin.analysis.whole_device import whole_of_step
from tb_memplugin.errors import NotRecordedError
from tb_memplugin.exports.json import WholeJson, whole_json
from tb_memplugin.server.monitored import Series
from tb_memplugin.server.selection import MOST_COLUMNS, Request
from tb_memplugin.server.session import Session
from tb_memplugin.server.shapes import Note, shape_of
from tb_memplugin.trace.result import json_fields
from tb_memplugin.trace.step_figures import DeviceFigures, PhaseFigures, StepFigures
from tb_memplugin.trace.tables import Int64

DEFAULT_COLUMNS = 1_000
MOST_MARKS = 200


@dataclass(frozen=True, slots=True)
class StepsAnswer(StepSeries):
    """The peaks of the steps that a monitor saw, in columns of about equally many steps."""

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
    return StepsAnswer(
        **json_fields(drawn),
        retries=_marks(figures.steps, device_figures.retries, first, last),
        ooms=_marks(figures.steps, device_figures.ooms, first, last),
    )


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


class FiguresOfStep(TypedDict):
    """The figures of a step; null if not counted."""

    peak_bytes: int
    """The peak."""
    at_least: bool
    """Whether it may have been higher."""
    end_bytes: int
    """At the end of the step."""
    peak_reserved_bytes: int | None
    end_reserved_bytes: int | None
    """Reserved, at most and at the end."""
    fragmentation: float | None
    """From 0 to 1."""
    retries: int | None
    ooms: int | None
    allocations: int | None
    allocated_bytes: int | None
    """In the step."""


class PhaseOfStep(TypedDict):
    """A phase of a step."""

    name: str
    """Its name."""
    count: int
    duration_ns: int
    """How often and how long it ran."""
    peak_bytes: int
    """Its peak."""
    at_least: bool
    """Whether it may have been higher."""
    end_bytes: int
    """At its end."""


class MonitoredWhole(TypedDict):
    """All steps of a device that a `MemoryMonitor` watched."""

    kind: str
    """`allocator`: torch's counters; `process`: resident memory."""
    capacity_bytes: int | None
    """The memory of the device."""
    count: int
    """How many steps."""
    first: int
    last: int
    """The first and last of them."""
    highest_step: int
    highest_bytes: int
    """The one with the highest peak."""
    retries: int | None
    ooms: int | None
    """In all steps; null if not counted."""
    duration_ns: int
    """Of all steps."""


class StepFiguresAnswer(FiguresOfStep):
    """Everything that a monitor recorded of one step."""

    run: str
    worker: str
    device: str
    """As picked."""
    step: int
    """As picked."""
    kind: str
    """`allocator`: torch's counters; `process`: resident memory."""
    product: str
    """The device's name."""
    capacity_bytes: int | None
    """The memory of the device."""
    torch: str | None
    """The version of torch."""
    duration_ns: int
    """The time of the step."""
    previous_step: int | None
    previous: FiguresOfStep | None
    """The step before: its number and figures."""
    phases: list[PhaseOfStep]
    """In the order in which they first ran."""
    whole_device: WholeJson | None
    """What filled the whole device when the step ended, or null,
    [as in the JSON of a trace](json_format.md#whole_device)."""
    whole: MonitoredWhole
    """All steps."""
    notes: list[Note]
    """What is not exact, and why."""


def answer_figures(session: Session, request: Request) -> StepFiguresAnswer:
    """Answer from the monitor's records only."""
    series, device = requested_series(session, request)
    figures, step = series.figures, request.number("step")
    row = watched_row(figures, step)
    device_figures = figures.devices[device]
    return {
        "run": request.text("run"),
        "worker": request.text("worker"),
        "device": device_figures.name,
        "kind": device_figures.kind,
        "product": device_figures.product,
        "capacity_bytes": device_figures.capacity,
        "torch": series.metadata.torch or None,
        "step": step,
        "duration_ns": int(figures.durations_ns[row]),
        **_row_shape(device_figures, row),
        "previous_step": int(figures.steps[row - 1]) if row else None,
        "previous": _row_shape(device_figures, row - 1) if row else None,
        "phases": [_phase_shape(phase, device, row) for phase in figures.phases if phase.counts[row]],
        "whole_device": _whole_device(device_figures, row),
        "whole": whole_shape(figures, device),
        "notes": [shape_of(Note, note, text=note) for note in figures.notes],
    }


def _whole_device(device: DeviceFigures, row: int) -> WholeJson | None:
    reading = whole_of_step(device, row)
    return whole_json([reading] if reading is not None else [], device.name)


def whole_shape(figures: StepFigures, device: int) -> MonitoredWhole:
    """Return a summary of all steps of a device."""
    device_figures = figures.devices[device]
    highest = int(device_figures.peak.argmax())
    return {
        "kind": device_figures.kind,
        "capacity_bytes": device_figures.capacity,
        "count": figures.step_count,
        "first": int(figures.steps[0]),
        "last": int(figures.steps[-1]),
        "highest_step": int(figures.steps[highest]),
        "highest_bytes": int(device_figures.peak[highest]),
        "retries": _sum(device_figures.retries),
        "ooms": _sum(device_figures.ooms),
        "duration_ns": int(figures.durations_ns.sum()),
    }


def _row_shape(device: DeviceFigures, row: int) -> FiguresOfStep:
    fragmentation = device.fragmentation
    return {
        "peak_bytes": int(device.peak[row]),
        "at_least": bool(device.at_least[row]),
        "end_bytes": int(device.end[row]),
        "peak_reserved_bytes": _value(device.peak_reserved, row),
        "end_reserved_bytes": _value(device.end_reserved, row),
        "fragmentation": None if fragmentation is None else float(fragmentation[row]),
        "retries": _value(device.retries, row),
        "ooms": _value(device.ooms, row),
        "allocations": _value(device.allocations, row),
        "allocated_bytes": _value(device.allocated_bytes, row),
    }


def _phase_shape(phase: PhaseFigures, device: int, row: int) -> PhaseOfStep:
    phase_bytes = phase.devices[device]
    return {
        "name": phase.name,
        "count": int(phase.counts[row]),
        "duration_ns": int(phase.durations_ns[row]),
        "peak_bytes": int(phase_bytes.peak[row]),
        "at_least": bool(phase_bytes.at_least[row]),
        "end_bytes": int(phase_bytes.end[row]),
    }


def _value(column: Int64 | None, row: int) -> int | None:
    return None if column is None else int(column[row])


def _sum(column: Int64 | None) -> int | None:
    return None if column is None else int(column.sum())
