"""The steps of a worker on each of its devices: those that were recorded and those that a monitor watched."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tb_memplugin.analysis.findings import Finding, Fine
from tb_memplugin.analysis.growth import monitored_growth, steady_rise
from tb_memplugin.analysis.leak_sites import FEWEST_STEPS
from tb_memplugin.analysis.ranks import MISSING
from tb_memplugin.proto.recording_pb2 import DeviceStats, StepMetadata
from tb_memplugin.trace.step_figures import StepFigures
from tb_memplugin.trace.tables import Bool, Int64


@dataclass(frozen=True, slots=True)
class Failed:
    """The requests that failed in all steps: how many, and the step, bytes and source line of the last.

    `step` is None if none failed. Bytes and line are None where only their number is known.
    """

    count: int
    step: int | None = None
    requested_bytes: int | None = None
    line: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class WorkerSteps:
    """The steps of a worker on one device, in order of their numbers.

    Attributes:
        capacity: the memory of the device in bytes, None if not known.
        steps: their numbers: int64, shape (steps,).
        counts: of how many steps each is, itself and those before it; same shape. More than 1 where a monitor
            joined short steps.
        allocated, reserved: the peak of each in bytes, MISSING where it was not recorded; same shape.
        at_least: whether the peak may have been higher.
        recorded: whether the step was recorded in full.
        growth: by how many bytes per step what is left after a step rises, 0 if it does not by the rules of
            Advice; None: too few steps to tell. Watched steps, on the CPU those of the process, come before
            recorded ones.
        failed: the requests that failed; None if that was not recorded.
        dump_of: the worker whose failed request wrote this; "" for a recording of a worker's own steps.
    """

    worker: str
    device: str
    capacity: int | None
    steps: Int64
    counts: Int64
    allocated: Int64
    reserved: Int64
    at_least: Bool
    recorded: Bool
    growth: int | None = None
    failed: Failed | None = None
    dump_of: str = ""

    @property
    def step_count(self) -> int:
        """How many steps there are figures of."""
        return int(self.counts.sum())


def worker_steps(
    worker: str, recorded: Sequence[StepMetadata], watched: StepFigures | None
) -> list[WorkerSteps]:
    """Return the steps of each of a worker's devices."""
    parts: dict[str, list[WorkerSteps]] = {}
    for part in [*(_watched(worker, watched) if watched else []), *_recorded(worker, recorded)]:
        parts.setdefault(part.device, []).append(part)
    devices = {device: _joined(of_device) for device, of_device in parts.items()}
    if watched and "cpu" in devices:
        growths = [_growth_watched(watched, "cpu"), devices["cpu"].growth]
        devices["cpu"] = replace(devices["cpu"], growth=_first_growth(growths))
    return list(devices.values())


def without_dumps(ranks: Sequence[WorkerSteps]) -> list[WorkerSteps]:
    """Leave out dumps of a device of a worker that is there itself: they are no rank of their own."""
    themselves = {(rank.worker, rank.device) for rank in ranks if not rank.dump_of}
    return [rank for rank in ranks if (rank.dump_of, rank.device) not in themselves]


def device_kind(device: str) -> str:
    """Return `cuda` for cuda:3."""
    return device.partition(":")[0]


def in_order(name: str) -> list[tuple[int, int, str]]:
    """Return a key that sorts numbers in a name by value: rank2 before rank10."""
    pieces = re.split(r"(\d{1,18})", name)  # text and numbers in turn
    return [(1, int(piece), "") if at % 2 else (0, 0, piece) for at, piece in enumerate(pieces)]


def _watched(worker: str, figures: StepFigures) -> list[WorkerSteps]:
    steps = figures.steps
    counts = np.diff(steps, prepend=steps[:1] - 1) if figures.is_joined else np.ones_like(steps)
    recorded, missing = np.zeros(len(steps), np.bool_), np.full(len(steps), MISSING)
    parts = []
    for device in figures.devices:
        growth = _growth_watched(figures, device.name)
        reserved = missing if device.peak_reserved is None else device.peak_reserved
        columns = (steps, counts, device.peak, reserved, device.at_least, recorded)
        failed = None if device.ooms is None else _counted(steps, device.ooms)
        parts.append(WorkerSteps(worker, device.name, device.capacity, *columns, growth, failed))
    return parts


def _growth_watched(figures: StepFigures, device: str) -> int | None:
    judged = monitored_growth(figures, device)
    return judged.bytes if isinstance(judged, Finding) else 0 if isinstance(judged, Fine) else None


def _first_growth(growths: Sequence[int | None]) -> int | None:
    """Return the first growth; 0 if there is none, None if none was judged."""
    judged = [growth for growth in growths if growth is not None]
    return next(filter(None, judged), 0) if judged else None


def _counted(steps: Int64, ooms: Int64) -> Failed:
    rows = np.flatnonzero(ooms)
    return Failed(int(ooms.sum()), int(steps[rows[-1]])) if len(rows) else Failed(0)


def _recorded(worker: str, recorded: Sequence[StepMetadata]) -> list[WorkerSteps]:
    of_device: dict[str, list[tuple[StepMetadata, DeviceStats]]] = {}
    for step in recorded:
        for device in step.devices:
            of_device.setdefault(device.device, []).append((step, device))
    return [_of_device(worker, name, steps) for name, steps in of_device.items()]


def _of_device(worker: str, name: str, recorded: list[tuple[StepMetadata, DeviceStats]]) -> WorkerSteps:
    rows = [
        (
            step.step,
            device.stats.peak_bytes,
            _or_missing(reserved_bytes(device)),
            step.window,
            device.stats.entry_bytes,
            device.stats.end_bytes,
        )
        for step, device in recorded
    ]
    steps, allocated, reserved, window, entry, end = np.array(rows, np.int64).T
    dump_of = recorded[-1][0].dump_of  # its last step has not ended, so what is left after it is no growth
    ended = np.array([not step.not_ended for step, _ in recorded])  # so are these
    levels = steps[ended], entry[ended], end[ended]
    comparable = _comparable(name, steps[ended], window[ended])
    return WorkerSteps(
        worker,
        name,
        capacity_bytes(recorded[-1][1]),
        steps,
        np.ones(len(steps), np.int64),
        allocated,
        reserved,
        at_least=np.zeros(len(steps), np.bool_),
        recorded=np.ones(len(steps), np.bool_),
        growth=None if dump_of else _growth(*levels, comparable, int(allocated.max())),
        failed=_failed(recorded),
        dump_of=dump_of,
    )


def _comparable(device: str, steps: Int64, window: Int64) -> slice:
    """Return the steps whose levels can be compared: increasing ones, on the CPU those of its longest window.

    On the CPU, what torch.profiler counts in one window says nothing about the next.
    """
    breaks = np.diff(steps) <= 0
    if device == "cpu":
        breaks |= np.diff(window) != 0
    starts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
    lengths = np.diff(np.append(starts, len(steps)))
    longest = len(lengths) - 1 - int(np.argmax(lengths[::-1]))
    return slice(int(starts[longest]), int(starts[longest] + lengths[longest]))


def _growth(steps: Int64, entry: Int64, end: Int64, rows: slice, peak: int) -> int | None:
    if rows.stop - rows.start < FEWEST_STEPS:
        return None
    first = rows.start
    levels = np.concatenate(([entry[first]], end[rows]))
    return steady_rise(levels, np.concatenate(([steps[first] - 1], steps[rows])), peak)


def _failed(recorded: Sequence[tuple[StepMetadata, DeviceStats]]) -> Failed | None:
    counts = [
        (step, device.failed_requests) for step, device in recorded if device.HasField("failed_requests")
    ]
    if not counts:
        return None
    count = sum(failed.count for _, failed in counts)
    last = next(((step.step, failed) for step, failed in reversed(counts) if failed.count), None)
    if last is None:
        return Failed(0)
    step, failed = last
    return Failed(count, step, failed.requested_bytes, failed.line or None)


def reserved_bytes(device: DeviceStats) -> int | None:
    """Return the step's highest reserved bytes, None if the device has no such counter."""
    stats = device.stats
    return stats.peak_reserved_bytes if stats.HasField("peak_reserved_bytes") else None


def capacity_bytes(device: DeviceStats) -> int | None:
    """Return the device's memory in bytes, None if unknown."""
    return device.capacity_bytes if device.HasField("capacity_bytes") else None


def _or_missing(value: int | None) -> int:
    return MISSING if value is None else value


def _ended_before(watched: WorkerSteps, recorded: WorkerSteps) -> WorkerSteps:
    """Let steps that were watched together end before a recorded one of them that is lower than they are."""
    peaks = dict(zip(recorded.steps.tolist(), recorded.allocated.tolist(), strict=True))
    steps, counts = watched.steps.copy(), watched.counts.copy()
    for row in np.flatnonzero(counts > 1):
        while counts[row] > 1 and peaks.get(int(steps[row]), watched.allocated[row]) < watched.allocated[row]:
            steps[row] -= 1
            counts[row] -= 1
    return replace(watched, steps=steps, counts=counts)


def _joined(parts: list[WorkerSteps]) -> WorkerSteps:
    """Join a monitor's steps and recorded ones; a step with several values keeps the last recording's."""
    if len(parts) == 1:
        (part,) = parts
        if (np.diff(part.steps) > 0).all():
            return part
    parts = [*(_ended_before(part, parts[-1]) for part in parts[:-1]), parts[-1]]
    steps = np.concatenate([part.steps for part in parts])
    order = np.argsort(steps, kind="stable")
    last = order[np.append(np.flatnonzero(np.diff(steps[order])), len(order) - 1)]

    def column(name: str) -> Any:
        return np.concatenate([getattr(part, name) for part in parts])[last]

    capacity = next((part.capacity for part in reversed(parts) if part.capacity is not None), None)
    fails = [part.failed for part in reversed(parts) if part.failed is not None]
    telling = next((failed for failed in fails if failed.count), fails[0] if fails else None)
    return WorkerSteps(
        parts[0].worker,
        parts[0].device,
        capacity,
        steps[last],
        np.minimum(column("counts"), np.diff(steps[last], prepend=-1)),
        column("allocated"),
        column("reserved"),
        column("at_least"),
        column("recorded"),
        growth=_first_growth([part.growth for part in parts]),
        failed=telling and replace(telling, count=max(failed.count for failed in fails)),
        dump_of=parts[-1].dump_of,
    )
