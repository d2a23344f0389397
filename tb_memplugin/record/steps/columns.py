"""Convert the steps that a monitor recorded to columns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tb_memplugin.record.steps.counters import Counters
from tb_memplugin.record.steps.recording import DeviceStep, MonitoredStep, PhaseStep
from tb_memplugin.trace.step_figures import DeviceFigures, PhaseBytes, PhaseFigures, StepFigures
from tb_memplugin.trace.tables import Int64


def figures_of(
    rows: Sequence[MonitoredStep], counters: Sequence[Counters], notes: Sequence[str] = ()
) -> StepFigures:
    """Return steps, of which there must be at least one, as columns."""
    names = list(dict.fromkeys(phase.name for step in rows for phase in step.phases))
    return StepFigures(
        steps=_column([step.step for step in rows]),
        durations_ns=_column([step.duration_ns for step in rows]),
        devices=tuple(
            _device_figures([step.devices[row] for step in rows], one) for row, one in enumerate(counters)
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
        peak=_column([one.peak_allocated for one in steps]),
        at_least=np.array([not one.exact for one in steps], np.bool_),
        end=_column([one.allocated for one in steps]),
        peak_reserved=_column([one.peak_reserved or 0 for one in steps]) if reserve else None,
        end_reserved=_column([one.reserved or 0 for one in steps]) if reserve else None,
        retries=_column([one.num_alloc_retries or 0 for one in steps]) if reserve else None,
        ooms=_column([one.num_ooms or 0 for one in steps]) if reserve else None,
        allocations=_column([one.allocations or 0 for one in steps]) if reserve else None,
        allocated_bytes=_column([one.allocated_bytes or 0 for one in steps]) if reserve else None,
    )


def _phase_figures(steps: Sequence[MonitoredStep], name: str, devices: int) -> PhaseFigures:
    absent = PhaseStep(name, 0, 0, (0,) * devices, (True,) * devices, (0,) * devices)
    found = [next((one for one in step.phases if one.name == name), absent) for step in steps]
    return PhaseFigures(
        name=name,
        counts=_column([one.count for one in found]),
        durations_ns=_column([one.duration_ns for one in found]),
        devices=tuple(
            PhaseBytes(
                peak=_column([one.peak_bytes[row] for one in found]),
                at_least=np.array([not one.exact[row] for one in found], np.bool_),
                end=_column([one.end_bytes[row] for one in found]),
            )
            for row in range(devices)
        ),
    )


def _column(values: Sequence[int]) -> Int64:
    return np.array(values, np.int64)
