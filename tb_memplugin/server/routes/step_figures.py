"""`step_figures`: everything that a monitor recorded of one step, and a summary of its run."""

from __future__ import annotations

from typing import TypedDict

from tb_memplugin.analysis.steps import highest_row
from tb_memplugin.analysis.whole_device import whole_of_step
from tb_memplugin.exports.json import WholeJson, whole_json
from tb_memplugin.server.routes.steps import requested_series, watched_row
from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Session
from tb_memplugin.server.shapes import Note
from tb_memplugin.trace.step_figures import DeviceFigures, PhaseFigures, StepFigures
from tb_memplugin.trace.tables import Int64


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


def answer(session: Session, request: Request) -> StepFiguresAnswer:
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
        "notes": [
            {"code": note.code, "level": note.level, "bytes": note.bytes, "device": note.device, "text": note}
            for note in figures.notes
        ],
    }


def _whole_device(device: DeviceFigures, row: int) -> WholeJson | None:
    reading = whole_of_step(device, row)
    return whole_json([reading] if reading is not None else [], device.name)


def whole_shape(figures: StepFigures, device: int) -> MonitoredWhole:
    """Return a summary of all steps of a device."""
    device_figures, highest = figures.devices[device], highest_row(figures, device)
    return {
        "kind": device_figures.kind,
        "capacity_bytes": device_figures.capacity,
        "count": len(figures),
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
