"""Figures of whole steps, as `MemoryMonitor` takes them: nothing of single allocations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from tb_memplugin.trace.tables import Bool, Int64


@dataclass(frozen=True, slots=True, eq=False)
class DeviceFigures:
    """A device's figures, a value a step; bytes are int64.

    Attributes:
        name: as torch spells the device; "process" for the memory of the process.
        kind: "allocator" where the allocator of torch counts, "process" where the system does.
        product, capacity: the device's product name, and its bytes, None where not known.
        peak: highest allocated bytes within the step.
        at_least: where the peak may have been higher: the counter told no more.
        end: allocated bytes when the step ended.
        peak_reserved, end_reserved: the same of the reserve; None where there is none.
        retries, ooms: allocations that were tried again after the cache was emptied, and that failed; None
            where not counted, as the two below.
        allocations, allocated_bytes: allocations in the step: count, and bytes.
    """

    name: str
    kind: str
    product: str
    capacity: int | None
    peak: Int64
    at_least: Bool
    end: Int64
    peak_reserved: Int64 | None = None
    end_reserved: Int64 | None = None
    retries: Int64 | None = None
    ooms: Int64 | None = None
    allocations: Int64 | None = None
    allocated_bytes: Int64 | None = None

    @property
    def fragmentation(self) -> np.ndarray | None:
        """(reserved - allocated) / reserved when each step ended, 0 to 1; None without a reserve."""
        if self.end_reserved is None:
            return None
        return (self.end_reserved - self.end) / np.maximum(self.end_reserved, 1)


@dataclass(frozen=True, slots=True, eq=False)
class PhaseBytes:
    """A phase's bytes on one device, a value a step: highest while it ran, and when it last ended."""

    peak: Int64
    at_least: Bool
    end: Int64


@dataclass(frozen=True, slots=True, eq=False)
class PhaseFigures:
    """A named phase, a value a step: how often it ran, for how many nanoseconds together; 0 where not.

    `devices` stand in the order of the steps' devices.
    """

    name: str
    counts: Int64
    durations_ns: Int64
    devices: tuple[PhaseBytes, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StepFigures:
    """Figures of consecutive steps.

    Attributes:
        steps: their numbers, rising; int64.
        durations_ns: from the end of the step before to its own end.
    """

    steps: Int64
    durations_ns: Int64
    devices: tuple[DeviceFigures, ...] = ()
    phases: tuple[PhaseFigures, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def __len__(self) -> int:
        return len(self.steps)

    def device_row(self, name: str) -> int | None:
        """Which of the devices has a name."""
        return next((row for row, device in enumerate(self.devices) if device.name == name), None)


def joined(parts: Sequence[StepFigures]) -> StepFigures:
    """Parts one after another. Devices are those of the first; a phase that a part lacks did not run there.

    Raises:
        ValueError: parts with other devices, or steps that do not rise.
    """
    names = list(dict.fromkeys(phase.name for part in parts for phase in part.phases))
    steps = np.concatenate([part.steps for part in parts])
    if bool((steps[1:] <= steps[:-1]).any()):
        raise ValueError("steps do not rise")
    if len({tuple(device.name for device in part.devices) for part in parts}) != 1:
        raise ValueError("records have different devices")
    phases = [[_phase(part, name) for part in parts] for name in names]
    return StepFigures(
        steps=steps,
        durations_ns=np.concatenate([part.durations_ns for part in parts]),
        devices=tuple(_joined(row) for row in zip(*(part.devices for part in parts), strict=True)),
        phases=tuple(
            replace(
                _joined(row), devices=tuple(map(_joined, zip(*(one.devices for one in row), strict=True)))
            )
            for row in phases
        ),
        notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)),
    )


def _joined(rows: Sequence[Any]) -> Any:
    """The first of the rows with its columns lengthened by the others'."""
    columns = {}
    for name in (one.name for one in fields(rows[0])):
        values = [getattr(row, name) for row in rows]
        if isinstance(values[0], np.ndarray):
            columns[name] = np.concatenate(values)
    return replace(rows[0], **columns)


def _phase(part: StepFigures, name: str) -> PhaseFigures:
    for phase in part.phases:
        if phase.name == name:
            return phase
    none = np.zeros(len(part), np.int64)
    nowhere = PhaseBytes(none, np.zeros(len(part), np.bool_), none)
    return PhaseFigures(name, none, none, tuple(nowhere for _ in part.devices))
