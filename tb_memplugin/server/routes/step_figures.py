"""`step_figures`: everything that a monitor recorded of one step, and a summary of its run."""

from __future__ import annotations

import numpy as np

from tb_memplugin.analysis.step_series import highest_row
from tb_memplugin.errors import NotRecordedError
from tb_memplugin.server.routes.steps import series_asked
from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Session
from tb_memplugin.server.shapes import Json
from tb_memplugin.trace.step_figures import DeviceFigures, PhaseFigures, StepFigures
from tb_memplugin.trace.tables import Int64


def answer(session: Session, request: Request) -> Json:
    """Answer from the monitor's records only."""
    series, device = series_asked(session, request)
    figures, step = series.figures, request.number("step")
    row = int(np.searchsorted(figures.steps, step))
    if row == len(figures) or figures.steps[row] != step:
        raise NotRecordedError(
            f"The monitor did not see step {step}.",
            where="step",
            fix=f"Choose one from {figures.steps[0]} to {figures.steps[-1]}.",
        )
    one = figures.devices[device]
    return {
        "run": request.text("run"),
        "worker": request.text("worker"),
        "device": one.name,
        "kind": one.kind,
        "product": one.product,
        "capacity_bytes": one.capacity,
        "torch": series.metadata.torch or None,
        "step": step,
        "duration_ns": int(figures.durations_ns[row]),
        **_row_shape(one, row),
        "previous_step": int(figures.steps[row - 1]) if row else None,
        "previous": _row_shape(one, row - 1) if row else None,
        "phases": [_phase_shape(phase, device, row) for phase in figures.phases if phase.counts[row]],
        "whole": whole_shape(figures, device),
        "notes": list(figures.notes),
    }


def whole_shape(figures: StepFigures, device: int) -> Json:
    """Return a summary of all steps of a device."""
    one, highest = figures.devices[device], highest_row(figures, device)
    return {
        "kind": one.kind,
        "capacity_bytes": one.capacity,
        "count": len(figures),
        "first": int(figures.steps[0]),
        "last": int(figures.steps[-1]),
        "highest_step": int(figures.steps[highest]),
        "highest_bytes": int(one.peak[highest]),
        "retries": _sum(one.retries),
        "ooms": _sum(one.ooms),
        "duration_ns": int(figures.durations_ns.sum()),
    }


def _row_shape(one: DeviceFigures, row: int) -> Json:
    fragmentation = one.fragmentation
    return {
        "peak_bytes": int(one.peak[row]),
        "at_least": bool(one.at_least[row]),
        "end_bytes": int(one.end[row]),
        "peak_reserved_bytes": _value(one.peak_reserved, row),
        "end_reserved_bytes": _value(one.end_reserved, row),
        "fragmentation": None if fragmentation is None else float(fragmentation[row]),
        "retries": _value(one.retries, row),
        "ooms": _value(one.ooms, row),
        "allocations": _value(one.allocations, row),
        "allocated_bytes": _value(one.allocated_bytes, row),
    }


def _phase_shape(phase: PhaseFigures, device: int, row: int) -> Json:
    one = phase.devices[device]
    return {
        "name": phase.name,
        "count": int(phase.counts[row]),
        "duration_ns": int(phase.durations_ns[row]),
        "peak_bytes": int(one.peak[row]),
        "at_least": bool(one.at_least[row]),
        "end_bytes": int(one.end[row]),
    }


def _value(column: Int64 | None, row: int) -> int | None:
    return None if column is None else int(column[row])


def _sum(column: Int64 | None) -> int | None:
    return None if column is None else int(column.sum())
