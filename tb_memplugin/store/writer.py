"""Write recordings into a logdir, where TensorBoard finds them while the training continues."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_TENSOR, Summary

from tb_memplugin.proto.recording_pb2 import SeriesMetadata, StepMetadata
from tb_memplugin.store import files
from tb_memplugin.store.blob import pack
from tb_memplugin.store.disk_sync import DiskSync, refusal
from tb_memplugin.store.event_file import blob_value, scalar_value, step_record
from tb_memplugin.store.files import absolute
from tb_memplugin.store.growing_file import UnsettledError
from tb_memplugin.store.leftovers import clear_logdir
from tb_memplugin.store.paths import SIDE_FOLDER, STEPS_END, STEPS_TAG, readable, side_file_name
from tb_memplugin.store.records import record
from tb_memplugin.store.step_records import VERSION, pack_figures
from tb_memplugin.store.summary import Window, WindowSummaries
from tb_memplugin.store.windows import write_window
from tb_memplugin.store.worker_folder import WorkerFolder, WriterFolder
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.step_figures import DeviceFigures, StepFigures

_log = logging.getLogger("tb_memplugin")


@dataclass(frozen=True, slots=True)
class WrittenWindow:
    """The result of writing one window.

    Attributes:
        folder: the worker's folder, which TensorBoard shows as a run.
        worker: the worker's name, with a number appended if the folder of the plain name was taken.
        window: the window's number within the folder, from 0.
        side_file, event_file: the paths of the written side file and of the created or extended event file.
        side_file_bytes, summary_bytes: the size of the side file, and the size of each step's summary.
    """

    folder: str
    worker: str
    window: int
    steps: tuple[int, ...]
    side_file: str
    event_file: str
    side_file_bytes: int
    summary_bytes: tuple[int, ...]


class RunWriter:
    """Writes the windows of one worker into `<logdir>/<worker>`.

    The folder is created at the first write, and again if it is deleted later. If another writer has used
    it, `<worker>.2` is used instead, and so on. A process and its forks may share a writer.

    Args:
        logdir: a local path or an fsspec URL. It need not exist.
        worker: the worker's name, any text; the folder's name is made safe from it.
        failed: called with an error that came only after `write`, on another thread: of the disk, as a rule.
        durable: whether `write` waits until the disk has the window.
    """

    def __init__(
        self,
        logdir: str,
        worker: str,
        failed: Callable[[Exception], object] = _log.warning,
        *,
        durable: bool = False,
    ) -> None:
        self._logdir = files.absolute(os.fspath(logdir))
        self._lock = threading.Lock()
        logdir = self._logdir
        self._disk = DiskSync(logdir, failed, idle=lambda: clear_logdir(logdir), durable=durable)
        self._claimed = WriterFolder(self._logdir, worker)
        self._windows = self._failed = 0

    @classmethod
    def into(cls, folder: str, worker: str, writer_id: str) -> RunWriter:
        """Return a writer for a folder that was claimed with `claim_folder`. It waits for the disk."""
        writer = cls(folder, worker)
        claimed = WorkerFolder(folder, worker, writer_id, flushed=True)
        writer._claimed = WriterFolder(folder, worker, claimed=claimed)
        return writer

    def write(self, trace: MemoryTrace) -> WrittenWindow:
        """Write a window: one side file, and the figures of each step. Readers see it when this returns.

        Raises:
            MemPluginError: the folder cannot be written or the disk is full. Earlier windows stay readable.
                No part of this window remains; or, where the file system does not tell whether it was
                written, the next call completes it.
        """
        with self._lock:
            try:
                return self._write(trace)
            except OSError as error:
                what = f"The memory profile could not be written: {error.strerror or error}."
                raise refusal(self._logdir, error, what) from error

    def _write(self, trace: MemoryTrace) -> WrittenWindow:
        if "\0" in self._logdir:
            raise OSError("a folder's name cannot have a NUL character")
        folder = self._claimed.current()
        folder.settle()
        while True:
            try:
                written = self._write_to(folder, trace, self._windows + self._failed)
            except OSError as error:
                self._failed += 1  # no number is used again
                if not isinstance(error, FileExistsError):  # as where someone else put a side file there
                    raise
            else:
                self._windows += 1
                return written

    def _write_to(self, folder: WorkerFolder, trace: MemoryTrace, number: int) -> WrittenWindow:
        window = Window(folder.worker, folder.writer_id, number, side_file_name(number))
        steps = window_steps(trace, window)
        events = b"".join(step_record(metadata, blob) for metadata, blob in steps)
        side_file, begin = files.join(folder.path, SIDE_FOLDER, window.side_file), time.perf_counter()
        write = lambda stream: write_window(stream, trace, window.writer_id, number)  # noqa: E731
        size = files.write_new(side_file, write, flushed=folder.flushed)
        try:
            if folder.flushed and not files.is_remote(side_file):
                for above in files.folders_above(side_file)[1:]:  # the first is
                    files.flush_path(above)  # before a step names the file
            event_file = folder.add_events(events)
        except UnsettledError:  # its steps may be readable, or become it: they need the side file
            self._disk.add(side_file)
            raise
        except OSError:
            files.discard(side_file)
            raise
        if not folder.flushed:
            self._disk.add(side_file, event_file, begin=begin)
        return WrittenWindow(
            folder=folder.path,
            worker=folder.worker,
            window=window.number,
            steps=tuple(step.number for step in trace.steps),
            side_file=side_file,
            event_file=event_file,
            side_file_bytes=size,
            summary_bytes=tuple(len(blob) for _, blob in steps),
        )


def window_steps(trace: MemoryTrace, window: Window) -> list[tuple[StepMetadata, bytes]]:
    """Return the metadata and the blob of each step of a window, as its event file has them."""
    summaries = WindowSummaries(trace, window)
    every = [summaries.metadata(row) for row in range(len(trace.steps))]
    return [(metadata, pack(summaries.outline(row, metadata))) for row, metadata in enumerate(every)]


class BlockWriter:
    """Writes the blocks of one tracer, with one `RunWriter` per folder and worker."""

    def __init__(self) -> None:
        self._writers: dict[tuple[str, str], tuple[RunWriter, int]] = {}

    def write(self, trace: MemoryTrace, block: int, logdir: str | os.PathLike[str], worker: str) -> None:
        """Write a traced block as the step with its number.

        If a block of this or a later number was already written, the block goes into a new run beside it.

        Args:
            trace: a trace with one step.
            block: the number of the block, from 0.

        Raises:
            MemPluginError: the folder cannot be written.
        """
        key = absolute(os.fspath(logdir)), worker
        writer, last = self._writers.get(key, (None, -1))
        if writer is None or block <= last:
            writer, last = RunWriter(*key), -1
        self._writers[key] = writer, last  # before it may fail: a second writer would take another folder
        writer.write(replace(trace, steps=tuple(replace(step, number=block) for step in trace.steps)))
        self._writers[key] = writer, block


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
