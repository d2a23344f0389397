"""Convert the steps that a monitor recorded to columns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tb_memplugin.record.steps.counters import Counters
from tb_memplugin.record.steps.recording import DeviceStep, MonitoredStep, PhaseStep
from tb_memplugin.trace.notes import Note
from tb_memplugin.trace.step_figures import DeviceFigures, PhaseBytes, PhaseFigures, StepFigures
from tb_memplugin.trace.tables import Int64


def figures_of(
    rows: Sequence[MonitoredStep], counters: Sequence[Counters], notes: Sequence[Note] = ()
) -> StepFigures:
    """Return steps, of which there must be at least one, as columns."""
    names = list(dict.fromkeys(phase.name for step in rows for phase in step.phases))
    return StepFigures(
        steps=_column([step.step for step in rows]),
        durations_ns=_column([step.duration_ns for step in rows]),
        devices=tuple(
            _device_figures([step.devices[row] for step in rows], counter)
            for row, counter in enumerate(counters)
        ),
        phases=tuple(_phase_figures(rows, name, len(counters)) for name in names),
        notes=tuple(notes),
    )


def _device_figures(steps: Sequence[DeviceStep], counters: Counters) -> DeviceFigures:
    reserve = counters.kind == "allocator"
    return DeviceFigures(
        name=counters.name,
        kind=counters.kind,
        product=counters.product,
        capacity=counters.capacity,
        peak=_column([step.peak_allocated for step in steps]),
        at_least=np.array([not step.exact for step in steps], np.bool_),
        end=_column([step.allocated for step in steps]),
        peak_reserved=_column([step.peak_reserved or 0 for step in steps]) if reserve else None,
        end_reserved=_column([step.reserved or 0 for step in steps]) if reserve else None,
        retries=_column([step.num_alloc_retries or 0 for step in steps]) if reserve else None,
        ooms=_column([step.num_ooms or 0 for step in steps]) if reserve else None,
        allocations=_column([step.allocations or 0 for step in steps]) if reserve else None,
        allocated_bytes=_column([step.allocated_bytes or 0 for step in steps]) if reserve else None,
        end_requested=_known([step.requested for step in steps]),
        whole_free=_known([step.whole_free for step in steps]),
        whole_total=_known([step.whole_total for step in steps]),
    )


def _phase_figures(steps: Sequence[MonitoredStep], name: str, devices: int) -> PhaseFigures:
    absent = PhaseStep(name, 0, 0, (0,) * devices, (True,) * devices, (0,) * devices)
    phases = [next((phase for phase in step.phases if phase.name == name), absent) for step in steps]
    return PhaseFigures(
        name=name,
        counts=_column([phase.count for phase in phases]),
        durations_ns=_column([phase.duration_ns for phase in phases]),
        devices=tuple(
            PhaseBytes(
                peak=_column([phase.peak_bytes[row] for phase in phases]),
                at_least=np.array([not phase.exact[row] for phase in phases], np.bool_),
                end=_column([phase.end_bytes[row] for phase in phases]),
            )
            for row in range(devices)
        ),
    )


def _known(values: Sequence[int | None]) -> Int64 | None:
    """Return a column with -1 for what is not known; None if nothing is."""
    known = any(value is not None for value in values)
    return _column([-1 if value is None else value for value in values]) if known else None


def _column(values: Sequence[int]) -> Int64:
    return np.array(values, np.int64)
