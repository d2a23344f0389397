"""The step series of MemoryMonitor, read through TensorBoard's data provider; each record is read once."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from tensorboard.context import RequestContext
from tensorboard.data import provider

from tb_memplugin.errors import NotRecordedError, UnreadableFileError
from tb_memplugin.proto.recording_pb2 import SeriesMetadata
from tb_memplugin.server.catalog import MOST_EXPERIMENTS, run_and_worker
from tb_memplugin.store.envelope import KEEP
from tb_memplugin.store.paths import PLUGIN_NAME, STEPS_TAG
from tb_memplugin.store.step_records import SeriesReader, read_series
from tb_memplugin.trace.step_figures import StepFigures, joined_before

ALL = 1 << 24
"""A number of records so high that TensorBoard does not sample them."""

_Key = tuple[str, str]
_Stamp = tuple[int, float, bytes]


@dataclass(frozen=True, slots=True)
class Series:
    """The steps of one monitor. `folder` is its run's name in TensorBoard; it last wrote at `written_ns`."""

    folder: str
    metadata: SeriesMetadata
    figures: StepFigures
    written_ns: int


@dataclass(slots=True)
class _Read:
    """What was read from a folder, and the stamp of its state then."""

    stamp: _Stamp
    records: dict[int, StepFigures]
    series: Series | None
    problems: list[UnreadableFileError]


@dataclass(frozen=True, slots=True)
class MonitoredRuns:
    """All series, by run and worker."""

    workers: dict[_Key, Series] = field(default_factory=dict)
    problems: tuple[UnreadableFileError, ...] = ()


class Monitored:
    """Keeps the figures of all monitors in memory, at about 100 bytes per step."""

    def __init__(self, data_provider: provider.DataProvider | None) -> None:
        self._provider = data_provider
        self._lock = threading.Lock()
        self._read: dict[tuple[str, str], _Read] = {}
        self._runs: dict[str, MonitoredRuns] = {}

    def runs(self, ctx: RequestContext, experiment: str, *, fresh: bool = False) -> MonitoredRuns:
        """Return all series: those of the last query, or if `fresh` those of a new query to TensorBoard."""
        runs = None if fresh else self._runs.get(experiment)
        if runs is None:
            with self._lock:
                runs = self._query(ctx, experiment)
                self._runs.pop(experiment, None)
                self._runs[experiment] = runs
                for oldest in list(self._runs)[:-MOST_EXPERIMENTS]:
                    self._forget(oldest)
        return runs

    def find(self, ctx: RequestContext, experiment: str, run: str, worker: str) -> Series:
        """Return the series of a worker.

        Raises:
            NotRecordedError: the worker has no series.
        """
        for fresh in (False, True):
            series = self.runs(ctx, experiment, fresh=fresh).workers.get((run, worker))
            if series is not None:
                return series
        raise NotRecordedError(
            f"No monitor watched worker {worker!r}.",
            where=run,
            fix="Watch it with MemoryMonitor, or choose another worker.",
        )

    def _query(self, ctx: RequestContext, experiment: str) -> MonitoredRuns:
        if self._provider is None:
            return MonitoredRuns()
        steps_only = provider.RunTagFilter(tags=[STEPS_TAG])
        listed = self._provider.list_tensors(
            ctx, experiment_id=experiment, plugin_name=PLUGIN_NAME, run_tag_filter=steps_only
        )
        stamps = {
            folder: (
                series[STEPS_TAG].max_step,
                series[STEPS_TAG].max_wall_time,
                series[STEPS_TAG].plugin_content,
            )
            for folder, series in listed.items()
            if STEPS_TAG in series
        }
        for key in [key for key in self._read if key[0] == experiment and key[1] not in stamps]:
            del self._read[key]
        stale = [folder for folder, stamp in stamps.items() if not self._is_read(experiment, folder, stamp)]
        if stale:
            self._read_anew(ctx, experiment, stale, stamps)
        return _by_worker([self._read[experiment, folder] for folder in sorted(stamps)])

    def _forget(self, experiment: str) -> None:
        del self._runs[experiment]
        for key in [key for key in self._read if key[0] == experiment]:
            del self._read[key]

    def _is_read(self, experiment: str, folder: str, stamp: _Stamp) -> bool:
        cached = self._read.get((experiment, folder))
        return cached is not None and cached.stamp == stamp

    def _read_anew(
        self, ctx: RequestContext, experiment: str, folders: list[str], stamps: dict[str, _Stamp]
    ) -> None:
        assert self._provider is not None
        steps_only = provider.RunTagFilter(runs=folders, tags=[STEPS_TAG])
        tensors = self._provider.read_tensors(
            ctx, experiment_id=experiment, plugin_name=PLUGIN_NAME, run_tag_filter=steps_only, downsample=ALL
        )
        for folder in folders:
            data = tensors.get(folder, {}).get(STEPS_TAG, [])
            before = self._read.get((experiment, folder))
            same = before is not None and before.stamp[2] == stamps[folder][2]
            records = before.records if before is not None and same else {}
            self._read[experiment, folder] = _read(folder, stamps[folder], data, records)


def _read(
    folder: str, stamp: _Stamp, data: list[provider.TensorDatum], earlier: dict[int, StepFigures]
) -> _Read:
    """Return the series of a folder; records that cannot be read are left out and listed as problems."""
    where = f"{folder}: {STEPS_TAG}"
    records, problems, series_reader = dict(earlier), [], SeriesReader(where)
    for datum in data:
        if datum.step not in records:
            try:
                records[datum.step] = series_reader.read(bytes(datum.numpy.item()))
            except (UnreadableFileError, ValueError, TypeError) as error:
                problems.append(_unreadable(error, where))
    try:
        parts = [records[step] for step in sorted(records) if len(records[step])]
        figures, damage = joined_before(parts)
        metadata, written_ns = read_series(stamp[2], where), int(stamp[1] * 1e9)
        series = None if figures is None else Series(folder, metadata, figures, written_ns)
        if damage is not None:
            problems.append(_unreadable(damage, where))
    except UnreadableFileError as error:
        series = None
        problems.append(_unreadable(error, where))
    return _Read(stamp, records, series, problems)


def _unreadable(error: Exception, where: str) -> UnreadableFileError:
    if isinstance(error, UnreadableFileError):
        return error
    return UnreadableFileError(f"The figures of steps are damaged ({error}).", where=where, fix=KEEP)


def _by_worker(folders: list[_Read]) -> MonitoredRuns:
    workers: dict[_Key, Series] = {}
    for series in (folder.series for folder in folders if folder.series is not None):
        key = run_and_worker(series.folder, series.metadata.worker)
        if key in workers:  # a copy of the folder
            key = (key[0], f"{key[1]} ({series.folder.rpartition('/')[2]})")
        workers[key] = series
    return MonitoredRuns(workers, tuple(problem for folder in folders for problem in folder.problems))
