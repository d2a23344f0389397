"""Stream the figures of steps into a logdir while a training runs: one record per write, no side file."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_TENSOR, Summary

from tb_memplugin.proto.recording_pb2 import SeriesMetadata
from tb_memplugin.store import files
from tb_memplugin.store.disk_sync import DiskSync
from tb_memplugin.store.event_file import blob_value, scalar_value
from tb_memplugin.store.growing_file import UnsettledError
from tb_memplugin.store.leftovers import clear_logdir
from tb_memplugin.store.paths import STEPS_END, STEPS_TAG, readable
from tb_memplugin.store.records import record
from tb_memplugin.store.step_records import VERSION, pack_figures
from tb_memplugin.store.worker_folder import WorkerFolder, WriterFolder
from tb_memplugin.trace.step_figures import DeviceFigures, StepFigures

SCALARS_EACH = 1_000
"""The number of first steps that all get scalars: TensorBoard keeps this many random points per series."""

FLUSH_SECONDS = 5.0
"""The shortest time between two flushes to the disk, however often records are written."""


class StepsWriter:
    """Writes the figures of one worker's steps into `<logdir>/<worker>.steps`.

    The folder is created at the first write, and again if it is deleted later. Not thread-safe.

    Args:
        logdir: a local path or an fsspec URL. It need not exist.
        worker: the worker's name, any text.
        epoch_ns: when the first step began, epoch nanoseconds.
        failed: called with an error that came only after `write`, on another thread: of the disk, as a rule.
        durable: whether `write` waits until the disk has the record.
    """

    def __init__(
        self,
        logdir: str,
        worker: str,
        epoch_ns: int,
        torch: str = "",
        failed: Callable[[Exception], object] = lambda _: None,
        *,
        durable: bool = False,
    ) -> None:
        folder = files.absolute(os.fspath(logdir))
        self._claimed = WriterFolder(folder, worker, STEPS_END)
        self._disk = DiskSync(folder, failed, FLUSH_SECONDS, lambda: clear_logdir(folder), durable=durable)
        self._epoch_ns, self._torch = epoch_ns, torch
        self._written = 0
        self._until_ns = epoch_ns

    def write(self, figures: StepFigures) -> str:
        """Append one record and the peaks as scalars. Return the event file, which readers can then read.

        Each of the first `SCALARS_EACH` steps gets scalars; after that, only the step with the highest peak
        in each record.

        Raises:
            UnsettledError: it is not known whether the record was written. It is kept for `settle` or the
                next call; the caller must not write these steps again.
            OSError: the folder cannot be written. Earlier records stay readable, nothing of this one remains.
            MemPluginError: no folder for this worker is free.
        """
        begin = time.perf_counter()
        folder = self._claimed.current()
        last = int(figures.steps[-1])
        event = Event(wall_time=time.time(), step=last, summary=Summary(value=[self._value(folder, figures)]))
        events = b"".join(record(entry.SerializeToString()) for entry in (event, *self._scalars(figures)))
        try:
            path = folder.add_events(events)
        except UnsettledError:
            self._count(figures)
            raise
        self._count(figures)
        self._disk.add(path, begin=begin)
        return path

    def settle(self) -> None:
        """Complete a record of which it is not known whether it was written.

        Raises:
            OSError: the folder cannot be written; it is still not known.
        """
        self._claimed.settle()

    def close(self) -> None:
        """Flush what was written to the disk, and wait for that some seconds at the most."""
        self._disk.start()
        self._disk.wait()

    def _count(self, figures: StepFigures) -> None:
        self._written += len(figures)
        self._until_ns += int(figures.durations_ns.sum())

    def _value(self, folder: WorkerFolder, figures: StepFigures) -> Summary.Value:
        content = SeriesMetadata(
            version=VERSION,
            worker=readable(folder.worker),
            writer_id=folder.writer_id,
            epoch_ns=self._epoch_ns,
            torch=self._torch,
        )
        return blob_value(STEPS_TAG, content.SerializeToString(), pack_figures(figures), DATA_CLASS_TENSOR)

    def _scalars(self, figures: StepFigures) -> Iterator[Event]:
        seconds = (self._until_ns + np.cumsum(figures.durations_ns)) / 1e9
        points: dict[int, list[Summary.Value]] = {}
        for device in figures.devices:
            for row in self._rows(device):
                points.setdefault(row, []).extend(_peaks(device, row, several=len(figures.devices) > 1))
        for row, values in sorted(points.items()):
            step = int(figures.steps[row])
            yield Event(wall_time=float(seconds[row]), step=step, summary=Summary(value=values))

    def _rows(self, device: DeviceFigures) -> list[int]:
        each = max(0, min(len(device.peak), SCALARS_EACH - self._written))
        highest = [each + int(np.argmax(device.peak[each:]))] if each < len(device.peak) else []
        return [*range(each), *highest]


def _peaks(device: DeviceFigures, row: int, *, several: bool) -> Iterator[Summary.Value]:
    series = f"memory/{readable(device.name)}" if several else "memory"
    name = "peak_resident" if device.kind == "process" else "peak_allocated"
    about = f"Highest bytes of {device.name} in the step"
    yield scalar_value(f"{series}/{name}", int(device.peak[row]), about)
    if device.peak_reserved is not None:
        about = f"Highest bytes reserved by the allocator of {device.name} in the step"
        yield scalar_value(f"{series}/peak_reserved", int(device.peak_reserved[row]), about)
