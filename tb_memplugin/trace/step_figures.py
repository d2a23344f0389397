"""Figures of whole steps, as `MemoryMonitor` records them; they contain no single allocations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from tb_memplugin.trace.notes import STEPS_JOINED, Note
from tb_memplugin.trace.tables import Bool, Int64


@dataclass(frozen=True, slots=True, eq=False)
class DeviceFigures:
    """A device's figures, one value per step; bytes are int64.

    Attributes:
        name: the device as torch spells it; "process" for the memory of the process.
        kind: "allocator" if torch's allocator counted, "process" if the operating system did.
        product, capacity: the device's product name, and its memory in bytes, None if not known.
        peak: highest allocated bytes within the step.
        at_least: True where `peak` is only a lower bound.
        end: allocated bytes when the step ended.
        peak_reserved, end_reserved: the same for reserved bytes; None if the device has no reserve.
        retries, ooms: allocations that were retried after the cache was emptied, and allocations that
            failed; None if not counted.
        allocations, allocated_bytes: the number and bytes of allocations in the step; None if not counted.
        end_requested: allocated bytes as requested, when the step ended; None if not counted.
        whole_free, whole_total: free and all bytes of the whole device when the step ended; of the process,
            those of the machine or of its cgroup's limit. -1 where not known, None if it never was.
        heap_free: what the C library holds free in the process's heap when the step ended. -1 where it was
            not read; None of devices.
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
    end_requested: Int64 | None = None
    whole_free: Int64 | None = None
    whole_total: Int64 | None = None
    heap_free: Int64 | None = None

    @property
    def fragmentation(self) -> np.ndarray | None:
        """(reserved - allocated) / reserved when each step ended, 0 to 1; None without a reserve."""
        if self.end_reserved is None:
            return None
        return (self.end_reserved - self.end) / np.maximum(self.end_reserved, 1)


@dataclass(frozen=True, slots=True, eq=False)
class PhaseBytes:
    """A phase's bytes on one device, one value per step: the peak, and the bytes when it last ended."""

    peak: Int64
    at_least: Bool
    end: Int64


@dataclass(frozen=True, slots=True, eq=False)
class PhaseFigures:
    """A named phase, one value per step: how often it ran, and its total nanoseconds; 0 if it did not run.

    `devices` has the order of the devices in `StepFigures`.
    """

    name: str
    counts: Int64
    durations_ns: Int64
    devices: tuple[PhaseBytes, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StepFigures:
    """Figures of consecutive steps.

    Attributes:
        steps: the numbers of the steps, increasing; int64.
        durations_ns: nanoseconds from the end of the previous step to the end of each step. With a note
            `STEPS_JOINED`, of all steps since the one before in this table, as are all figures.
    """

    steps: Int64
    durations_ns: Int64
    devices: tuple[DeviceFigures, ...] = ()
    phases: tuple[PhaseFigures, ...] = ()
    notes: tuple[Note, ...] = field(default=())

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def step_count(self) -> int:
        """How many steps the figures are of."""
        return int(self.steps[-1] - self.steps[0]) + 1 if self.is_joined else len(self)

    @property
    def is_joined(self) -> bool:
        """Whether figures are of all steps since those before, as where steps were too short to read each."""
        return any(note.code == STEPS_JOINED for note in self.notes)

    def range_of(self, row: int) -> range:
        """Return the numbers of the steps that a row is of."""
        last = int(self.steps[row])
        return range(int(self.steps[row - 1]) + 1 if row and self.is_joined else last, last + 1)

    def steps_of(self, row: int) -> str:
        """Return which steps a row is of: "step 7", or "steps 4 to 7"."""
        steps = self.range_of(row)
        return f"step {steps[-1]}" if len(steps) == 1 else f"steps {steps[0]:,} to {steps[-1]:,}"

    def device_row(self, name: str) -> int | None:
        """Return the index of the device with a name, or None."""
        return next((row for row, device in enumerate(self.devices) if device.name == name), None)


@dataclass(frozen=True, slots=True)
class WatchedSteps:
    """The figures of all steps that a worker's monitor recorded. `folder` is the folder that it wrote to."""

    folder: str
    worker: str
    figures: StepFigures


def joined(parts: Sequence[StepFigures]) -> StepFigures:
    """Concatenate parts in the order of their steps. A phase that is missing in a part did not run there.

    Steps that an earlier part has already are left out, with a note: a writer that was told of an error
    although its steps were written may have written them again.

    Raises:
        ValueError: the parts have different devices, or the step numbers do not increase.
    """
    parts = sorted(parts, key=lambda part: part.steps[:1].tolist())
    parts = _without_repeats(parts)
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
                _joined(row), devices=tuple(map(_joined, zip(*(phase.devices for phase in row), strict=True)))
            )
            for row in phases
        ),
        notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)),
    )


def joined_before(parts: Sequence[StepFigures]) -> tuple[StepFigures | None, ValueError | None]:
    """Concatenate the parts up to the first that does not belong to those before it.

    Returns:
        The steps, None if not even the first part is right; and what is wrong, None if nothing is.
    """
    figures, error = None, None
    right, wrong = 0, len(parts) + 1  # so many parts can be joined, and so many cannot
    while wrong - right > 1:
        count = len(parts) if wrong > len(parts) else (right + wrong) // 2
        try:
            figures, right = joined(parts[:count]), count
        except ValueError as reason:
            error, wrong = reason, count
        if right == len(parts):
            break
    return figures, error


def _without_repeats(parts: Sequence[StepFigures]) -> Sequence[StepFigures]:
    """Return the parts without steps that earlier ones have; a note on the first says how many there were."""
    numbers = np.concatenate([part.steps for part in parts])
    if bool((numbers[1:] > numbers[:-1]).all()):
        return parts
    earlier = numbers[:0]
    new: list[StepFigures] = []
    repeats = 0
    for part in parts:
        is_new = ~np.isin(part.steps, earlier)
        repeats += int((~is_new).sum())
        earlier = np.concatenate((earlier, part.steps))
        new.append(_rows(part, is_new))
    if not repeats:
        return parts
    were = "step was" if repeats == 1 else "steps were"
    text = f"{repeats:,} {were} written twice, after an error of the file system. One copy counts."
    note = Note(text, "steps_repeated", level="warning")
    return [replace(new[0], notes=(*new[0].notes, note)), *new[1:]]


def _rows(table: Any, rows: Bool) -> Any:
    """Return a table, and the tables in it, with some of the rows of every column."""
    columns: dict[str, Any] = {}
    for name in (column.name for column in fields(table)):
        value = getattr(table, name)
        if isinstance(value, np.ndarray):
            columns[name] = value[rows]
        elif name in ("devices", "phases"):
            columns[name] = tuple(_rows(part, rows) for part in value)
    return replace(table, **columns)


def _joined(rows: Sequence[Any]) -> Any:
    """Return the first row with the columns of all rows concatenated."""
    columns = {}
    for name in (column.name for column in fields(rows[0])):
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
