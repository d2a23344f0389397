"""`step_figures`: everything that a monitor recorded of one step, and a summary of its run."""

from __future__ import annotations

import numpy as np

from tb_memplugin.analysis.steps import highest_row
from tb_memplugin.errors import NotRecordedError
from tb_memplugin.server.routes.steps import requested_series
from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Session
from tb_memplugin.server.shapes import Json
from tb_memplugin.trace.step_figures import DeviceFigures, PhaseFigures, StepFigures
from tb_memplugin.trace.tables import Int64


def answer(session: Session, request: Request) -> Json:
    """Answer from the monitor's records only."""
    series, device = requested_series(session, request)
    figures, step = series.figures, request.number("step")
    row = int(np.searchsorted(figures.steps, step))
    if row == len(figures) or figures.steps[row] != step:
        raise NotRecordedError(
            f"The monitor did not see step {step}.",
            where="step",
            fix=f"Choose one from {figures.steps[0]} to {figures.steps[-1]}.",
        )
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
        "whole": whole_shape(figures, device),
        "notes": list(figures.notes),
    }


def whole_shape(figures: StepFigures, device: int) -> Json:
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


def _row_shape(device: DeviceFigures, row: int) -> Json:
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


def _phase_shape(phase: PhaseFigures, device: int, row: int) -> Json:
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
