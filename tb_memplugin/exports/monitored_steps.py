"""CSV and JSON of the figures that `MemoryMonitor` records: one row per step, device and phase.

Columns and fields are named like those of the steps that `MemoryMonitor.step` returns.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tb_memplugin.exports.csv import cell
from tb_memplugin.exports.output import replacing, written_by
from tb_memplugin.trace.step_figures import DeviceFigures, PhaseFigures, StepFigures, WatchedSteps

FORMAT = "tb_memplugin.steps"
VERSION = 1

COLUMNS = (
    *("folder", "worker", "step", "device", "phase", "count", "duration_ns", "peak_allocated", "exact"),
    *("allocated", "peak_reserved", "reserved", "fragmentation", "num_alloc_retries", "num_ooms"),
    *("allocations", "allocated_bytes", "requested", "whole_free", "whole_total", "heap_free"),
)
"""`phase` and `count` are empty for the whole step. A phase has no columns after `allocated`."""

_STORED = {
    "peak_reserved": "peak_reserved",
    "reserved": "end_reserved",
    "fragmentation": "fragmentation",
    "num_alloc_retries": "retries",
    "num_ooms": "ooms",
    "allocations": "allocations",
    "allocated_bytes": "allocated_bytes",
    "requested": "end_requested",
    "whole_free": "whole_free",
    "whole_total": "whole_total",
    "heap_free": "heap_free",
}
"""The attribute of `DeviceFigures` for each field that not every device has."""


def write_csv(workers: Sequence[WatchedSteps], path: str | os.PathLike[str]) -> None:
    """Write a row for each step and device, and one for each phase that ran in the step. Bytes; nanoseconds.

    Raises:
        MemPluginError: the file cannot be written.
    """
    with replacing(path) as stream:
        stream.write((",".join(COLUMNS) + "\n").encode())
        for worker in workers:
            for row in _rows(worker):
                text = ",".join(_cell(row.get(column)) for column in COLUMNS)
                stream.write((text + "\n").encode("utf-8", "backslashreplace"))


def write_json(workers: Sequence[WatchedSteps], path: str | os.PathLike[str]) -> None:
    """Write all workers with their steps, one step per line. Schema: docs/monitor.md.

    Raises:
        MemPluginError: the file cannot be written.
    """
    head = {"format": FORMAT, "version": VERSION, "written_by": written_by()}
    with replacing(path) as stream:
        stream.write(f'{json.dumps(head)[:-1]}, "workers": ['.encode())
        for number, worker in enumerate(workers):
            stream.write(b",\n" if number else b"\n")
            stream.write(f'{json.dumps(_described(worker))[:-1]}, "steps": ['.encode())
            for row, step in enumerate(_steps(worker.figures)):
                stream.write(f"{',' if row else ''}\n{json.dumps(step)}".encode())
            stream.write(b"\n]}")
        stream.write(b"\n]}\n")


def _described(worker: WatchedSteps) -> dict[str, Any]:
    devices = [
        {
            "name": device.name,
            "kind": device.kind,
            "product": device.product,
            "capacity_bytes": device.capacity,
        }
        for device in worker.figures.devices
    ]
    notes = list(worker.figures.notes)
    return {"folder": worker.folder, "worker": worker.worker, "devices": devices, "notes": notes}


def _steps(figures: StepFigures) -> Iterator[dict[str, Any]]:
    """Yield each step with the fields of a `MonitoredStep`; only phases that ran."""
    devices = [_device_steps(device) for device in figures.devices]
    phases = [_phase_steps(phase) for phase in figures.phases]
    for step, duration_ns in zip(figures.steps.tolist(), figures.durations_ns.tolist(), strict=True):
        yield {
            "step": step,
            "duration_ns": duration_ns,
            "devices": [next(device) for device in devices],
            "phases": [phase for phase in map(next, phases) if phase["count"]],
        }


def _device_steps(device: DeviceFigures) -> Iterator[dict[str, Any]]:
    none = [None] * len(device.peak)
    columns = [getattr(device, attribute) for attribute in _STORED.values()]
    stored = zip(*(none if column is None else _values(column) for column in columns), strict=True)
    levels = zip(device.peak.tolist(), device.at_least.tolist(), device.end.tolist(), strict=True)
    for (peak, at_least, end), values in zip(levels, stored, strict=True):
        step = {"device": device.name, "peak_allocated": peak, "exact": not at_least, "allocated": end}
        yield {**step, **dict(zip(_STORED, values, strict=True))}


def _values(column: np.ndarray) -> list[float | None]:
    """Return the values of a column, None where they are not known."""
    return [None if value == -1 else value for value in column.tolist()]


def _phase_steps(phase: PhaseFigures) -> Iterator[dict[str, Any]]:
    columns = (
        [getattr(device, name).tolist() for device in phase.devices] for name in ("peak", "at_least", "end")
    )
    peaks, at_least, ends = (zip(*column, strict=True) for column in columns)
    runs = zip(phase.counts.tolist(), phase.durations_ns.tolist(), strict=True)
    for (count, duration_ns), peak, bound, end in zip(runs, peaks, at_least, ends, strict=True):
        yield {
            "name": phase.name,
            "count": count,
            "duration_ns": duration_ns,
            "peak_bytes": peak,
            "exact": [not flag for flag in bound],
            "end_bytes": end,
        }


def _rows(worker: WatchedSteps) -> Iterator[dict[str, Any]]:
    """Yield the cells of each row by column; those that are missing are empty."""
    for step in _steps(worker.figures):
        step_cells = {"folder": worker.folder, "worker": worker.worker, "step": step["step"]}
        for row, device in enumerate(step["devices"]):
            yield {**step_cells, "duration_ns": step["duration_ns"], **device}
            for phase in step["phases"]:
                yield {
                    **step_cells,
                    "device": device["device"],
                    "phase": phase["name"],
                    "count": phase["count"],
                    "duration_ns": phase["duration_ns"],
                    "peak_allocated": phase["peak_bytes"][row],
                    "exact": phase["exact"][row],
                    "allocated": phase["end_bytes"][row],
                }


def _cell(value: object) -> str:
    return cell(str(value).lower() if isinstance(value, bool) else value)
