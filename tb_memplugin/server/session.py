"""What routes need to answer a request: the step that it names, its summary, and its window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from tb_memplugin.errors import NotRecordedError, UnreadableFileError
from tb_memplugin.proto.recording_pb2 import DeviceSummary, StepSummary
from tb_memplugin.server.cache import MIB, Cache
from tb_memplugin.server.catalog import SUMMARY_BYTES, Catalog, Entry, bytes_of
from tb_memplugin.server.monitored import Monitored, Series
from tb_memplugin.server.selection import Request
from tb_memplugin.server.windows import Windows
from tb_memplugin.store import files
from tb_memplugin.store.health import unreadable_files
from tb_memplugin.store.paths import readable
from tb_memplugin.store.reader import unfolded
from tb_memplugin.store.summary import step_span
from tb_memplugin.store.worker_steps import WorkerSteps, in_order, worker_steps
from tb_memplugin.trace import MemoryTrace

WORKER_STEPS_BYTES = 32 * MIB
"""The most bytes of the cached steps of workers: about 30 per step."""

LONGEST_ERROR = 1_000
"""The most characters of each text of an error, which may repeat a parameter or a run's name."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The step and the device that a request names."""

    entry: Entry
    device: str
    is_window: bool = False
    """Whether the request asks for all steps of the window together."""

    @property
    def epoch_ns(self) -> int:
        """When the window began; times in requests and answers are relative to it."""
        return self.entry.metadata.epoch_ns


@dataclass(frozen=True, slots=True)
class Opened:
    """A window in memory, and the rows in it of the step and device that a request names.

    `is_window`: whether the request asks for all steps of the window together.
    """

    trace: MemoryTrace
    step: int
    device: int
    epoch_ns: int
    is_window: bool = False

    def span(self) -> tuple[int, int]:
        """Return the start and end of the step, or of the window if `is_window`, in epoch nanoseconds."""
        return self.window_span() if self.is_window else step_span(self.trace, self.step)

    def time_ns(self, event: int) -> int:
        """Return the time of an event since the window's epoch; for -1, when the first step began."""
        return self.trace.time_of(event) - self.epoch_ns

    def events(self) -> tuple[int, int]:
        """Return the first event of the step, or of the window if `is_window`, and the one after its last."""
        if self.is_window:
            return self.trace.step_events(0)[0], self.trace.step_events(len(self.trace.steps) - 1)[1]
        return self.trace.step_events(self.step)

    def window_span(self) -> tuple[int, int]:
        """Return the start and end of the whole window, in epoch nanoseconds."""
        return step_span(self.trace, 0)[0], step_span(self.trace, len(self.trace.steps) - 1)[1]


class Session:
    """The state that routes share while TensorBoard runs."""

    def __init__(self, catalog: Catalog, monitored: Monitored, windows: Windows, logdir: str) -> None:
        self.catalog, self.monitored = catalog, monitored
        self.windows, self.logdir = windows, logdir
        self._unfolded = Cache(SUMMARY_BYTES)
        self._worker_steps = Cache(WORKER_STEPS_BYTES)

    def unreadable_files(self) -> list[UnreadableFileError]:
        """Return errors of our files in the logdir, as found by a quick check or by earlier requests."""
        errors = self.windows.problems()
        if self.logdir and not files.is_remote(self.logdir):
            errors += unreadable_files(self.logdir)
        return errors

    def worker_steps(
        self, request: Request, only: str | None = None, *, fresh: bool = False
    ) -> dict[str, list[WorkerSteps]]:
        """Return the steps of all workers on each of their devices, by run: rank2 before rank10.

        Args:
            only: a run; None: all.
            fresh: whether to query TensorBoard anew.
        """
        recorded = self.catalog.listing(request.ctx, request.experiment, fresh=fresh).workers
        watched = self.monitored.runs(request.ctx, request.experiment, fresh=fresh).workers
        runs: dict[str, list[WorkerSteps]] = {}
        for run, worker in {**recorded, **watched}:
            if only not in (None, run):
                continue
            entries, series = recorded.get((run, worker), []), watched.get((run, worker))
            key = (request.experiment, run, worker, *_extent(entries, series))
            compute = partial(_steps_of, worker, entries, series)
            runs.setdefault(run, []).extend(self._worker_steps.get(key, compute))
        for ranks in runs.values():
            ranks.sort(key=lambda rank: (in_order(rank.worker), in_order(rank.device)))
        return {run: ranks for run, ranks in runs.items() if ranks}

    def chosen(self, request: Request, prefix: str = "", step: int | None = None) -> Chosen:
        """Return the step and device that a request names.

        Args:
            prefix: the beginning of the parameters' names: "base_" for the base of a comparison.
            step: the step's number, instead of the parameter.

        Raises:
            NotRecordedError: there is no such step or device.
            MemPluginError: a parameter is missing or wrong.
        """
        number = request.number(f"{prefix}step") if step is None else step
        window = request.number(f"{prefix}window") if request.has(f"{prefix}window") else None
        entry = self.catalog.find(
            request.ctx,
            request.experiment,
            request.text(f"{prefix}run"),
            request.text(f"{prefix}worker"),
            number,
            window,
        )
        device = request.text(f"{prefix}device", entry.devices[0] if entry.devices else None)
        if device not in entry.devices:
            raise NotRecordedError(
                f"Device {device!r} has no events here.",
                where=f"{prefix}device",
                fix=f"Choose one of: {', '.join(entry.devices)}.",
            )
        return Chosen(entry, device, is_window=request.text(f"{prefix}span", "step") == "window")

    def summary(self, request: Request, chosen: Chosen) -> StepSummary:
        """Return the step's summary; if it was shortened, recompute it from the window. Do not modify it."""
        summary = self.catalog.summary(request.ctx, request.experiment, chosen.entry)
        if not summary.folded:
            return summary
        entry = chosen.entry
        key = (entry.folder, entry.tag, entry.metadata.writer_id)
        try:
            return self._unfolded.get(
                key, lambda: unfolded(self.opened(chosen).trace, entry.metadata), bytes_of
            )
        except UnreadableFileError:
            return summary

    def device_summary(self, request: Request, chosen: Chosen) -> tuple[StepSummary, DeviceSummary]:
        """Return the step's summary, and the device's part of it."""
        summary = self.summary(request, chosen)
        for device in summary.devices:
            if device.name == chosen.device:
                return summary, device
        raise UnreadableFileError(
            "The step's summary does not contain this device.", where=chosen.entry.tag, fix="Record it again."
        )

    def opened(self, chosen: Chosen) -> Opened:
        """Load the step's window.

        Raises:
            UnreadableFileError: its side file does not exist or cannot be read.
        """
        trace = self.windows.load(chosen.entry)
        rows = [row for row, device in enumerate(trace.devices) if readable(device.name) == chosen.device]
        if not rows:
            where = self.windows.display(chosen.entry)
            raise UnreadableFileError(
                "The side file belongs to another window.", where=where, fix="Record the window again."
            )
        step = trace.step_row(chosen.entry.metadata.step)
        return Opened(trace, step, rows[0], chosen.epoch_ns, chosen.is_window)


def _steps_of(worker: str, entries: Sequence[Entry], series: Series | None) -> list[WorkerSteps]:
    return worker_steps(worker, [entry.metadata for entry in entries], series.figures if series else None)


def _extent(entries: Sequence[Entry], series: Series | None) -> tuple[object, ...]:
    """Return what changes whenever a worker has another step: writers only ever append."""
    recorded = () if not entries else (entries[-1].metadata.writer_id, len(entries), entries[-1].tag)
    watched = (
        ()
        if series is None
        else (series.metadata.writer_id, len(series.figures), int(series.figures.steps[-1]))
    )
    return (recorded, watched)


def error_body(error: Exception) -> dict[str, dict[str, str]]:
    """Return an error in the form of the HTTP API."""
    message, where, fix = (str(getattr(error, part, "")) for part in ("what", "where", "fix"))
    texts = {"what": message or f"{type(error).__name__}: {error}", "where": where, "fix": fix}
    return {"error": {part: _cut(text) for part, text in texts.items()}}


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_ERROR else f"{text[: LONGEST_ERROR - 1]}…"
