"""The recordings that TensorBoard has loaded: runs, workers, steps, and what could not be read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count

from tensorboard.context import RequestContext
from tensorboard.data import provider
from tensorboard.errors import PublicError

from tb_memplugin.errors import NotRecordedError, UnreadableFileError
from tb_memplugin.proto.recording_pb2 import StepMetadata, StepSummary
from tb_memplugin.server.cache import MIB, Cache
from tb_memplugin.store.blob import read_metadata, read_summary
from tb_memplugin.store.paths import PLUGIN_NAME, superseded

SUMMARY_BYTES = 32 * MIB
"""The most bytes of all cached summaries; they are kept because asking TensorBoard's data server is slow."""

MOST_EXPERIMENTS = 8
"""How many experiments are kept. TensorBoard has one, but it takes any name for it: /experiment/NAME/."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One recorded step. `folder` is the run's name in TensorBoard: the worker's folder in the logdir."""

    run: str
    worker: str
    folder: str
    tag: str
    metadata: StepMetadata

    @property
    def devices(self) -> tuple[str, ...]:
        """The names of the step's devices."""
        return tuple(device.device for device in self.metadata.devices)


@dataclass(frozen=True, slots=True)
class Listing:
    """All recorded steps, by run and worker, in order of window and step."""

    workers: dict[tuple[str, str], list[Entry]] = field(default_factory=dict)
    problems: tuple[UnreadableFileError, ...] = ()
    number: int = 0
    """Another one for every change."""


Contents = dict[str, dict[str, bytes]]
"""The metadata of each step, by folder and tag."""


class Catalog:
    """Lists and reads recorded steps through TensorBoard's data provider, of any kind."""

    def __init__(self, data_provider: provider.DataProvider | None) -> None:
        self._provider = data_provider
        self._listings: dict[str, tuple[Contents, Listing]] = {}
        self._numbers = count(1)
        self._summaries = Cache(SUMMARY_BYTES)
        self._read: dict[bytes, StepMetadata] = {}

    def listing(self, ctx: RequestContext, experiment: str, *, fresh: bool = False) -> Listing:
        """Return all steps: those of the last query, or if `fresh` those of a new query to TensorBoard.

        A query to TensorBoard's data server takes about 40 ms, too long for every zoom. The route `runs`
        makes a new query, and so does a request for an unknown step. While nothing has changed, the listing
        is the same object.
        """
        last = self._listings.get(experiment)
        if last is not None and not fresh:
            return last[1]
        contents = self._list(ctx, experiment)
        if last is None or last[0] != contents:
            last = contents, replace(self._sorted(contents), number=next(self._numbers))
            self._listings.pop(experiment, None)
            self._listings[experiment] = last
            for oldest in list(self._listings)[:-MOST_EXPERIMENTS]:
                self._listings.pop(oldest, None)
        return last[1]

    def find(
        self,
        ctx: RequestContext,
        experiment: str,
        run: str,
        worker: str,
        step: int,
        window: int | None = None,
    ) -> Entry:
        """Return the entry of a step; if several windows have the step, that of the last or the named one.

        Raises:
            NotRecordedError: there is no such step.
        """
        listing = Listing()
        for fresh in (False, True):
            listing = self.listing(ctx, experiment, fresh=fresh)
            for entry in reversed(listing.workers.get((run, worker), [])):
                if entry.metadata.step == step and window in (None, entry.metadata.window):
                    return entry
        raise _not_recorded(listing, run, worker, step, window)

    def worker(self, ctx: RequestContext, experiment: str, entry: Entry) -> list[Entry]:
        """Return all steps of the worker that recorded the given step."""
        return self.listing(ctx, experiment).workers.get((entry.run, entry.worker), [entry])

    def summary(self, ctx: RequestContext, experiment: str, entry: Entry) -> StepSummary:
        """Return a step's summary. Requests share it: do not modify it.

        Raises:
            NotRecordedError: TensorBoard no longer has the step.
            UnreadableFileError: the summary is damaged, or newer than this reader.
        """
        key = (experiment, entry.folder, entry.tag, entry.metadata.writer_id)

        def read() -> StepSummary:
            blob = self._blob(ctx, experiment, entry)
            return read_summary(blob, f"{entry.folder}: {entry.tag}", entry.metadata)

        return self._summaries.get(key, read, bytes_of)

    def _sorted(self, contents: Contents) -> Listing:
        """Sort the steps; metadata is parsed only once, because for 20,000 steps that takes a second."""
        cached, self._read = self._read, {}

        def metadata(content: bytes, where: str) -> StepMetadata:
            parsed = cached.get(content) or read_metadata(content, where)
            self._read[content] = parsed
            return parsed

        return _sorted(contents, metadata)

    def _list(self, ctx: RequestContext, experiment: str) -> Contents:
        if self._provider is None:
            return {}
        listed = self._provider.list_blob_sequences(ctx, experiment_id=experiment, plugin_name=PLUGIN_NAME)
        return {
            folder: {tag: series.plugin_content for tag, series in tags.items()}
            for folder, tags in listed.items()
        }

    def _blob(self, ctx: RequestContext, experiment: str, entry: Entry) -> bytes:
        assert self._provider is not None
        only = provider.RunTagFilter(runs=[entry.folder], tags=[entry.tag])
        sequences = self._provider.read_blob_sequences(
            ctx, experiment_id=experiment, plugin_name=PLUGIN_NAME, run_tag_filter=only, downsample=1
        )
        data = sequences.get(entry.folder, {}).get(entry.tag, [])
        if not data or not data[-1].values:
            raise NotRecordedError(
                "TensorBoard no longer has this step.",
                where=f"{entry.folder}: {entry.tag}",
                fix="Reload the page.",
            )
        try:
            blob: bytes = self._provider.read_blob(ctx, blob_key=data[-1].values[0].blob_key)
        except PublicError as error:
            raise UnreadableFileError(
                "TensorBoard's fast data server cannot read this step: it fails on quotes, "
                "backslashes and control characters in run names.",
                where=f"{entry.folder}: {entry.tag}",
                fix="Rename the run's folder, or start TensorBoard with --load_fast=false.",
            ) from error
        return blob


def bytes_of(summary: StepSummary) -> int:
    """Return about how many bytes a summary has in memory: twice those of its file."""
    return 2 * int(summary.ByteSize())


def run_and_worker(folder: str, worker: str) -> tuple[str, str]:
    """Return run and worker for the name of a TensorBoard run, whose last part is the worker's folder."""
    if folder in {"", "."}:
        return ".", worker
    run = folder.replace("\\", "/").rpartition("/")[0]
    return run or ".", worker


def _sorted(contents: Contents, read: Callable[[bytes, str], StepMetadata]) -> Listing:
    workers: dict[tuple[str, str], list[Entry]] = {}
    problems: list[UnreadableFileError] = []
    folders: dict[str, list[Entry]] = {}
    for folder in sorted(contents):
        for tag, content in contents[folder].items():
            try:
                metadata = read(content, f"{folder}: {tag}")
            except UnreadableFileError as error:
                problems.append(error)
                continue
            entry = Entry(*run_and_worker(folder, metadata.worker), folder, tag, metadata)
            folders.setdefault(folder, []).append(entry)
    replaced = superseded({folder: entries[0].metadata.worker for folder, entries in folders.items()})
    for folder, entries in folders.items():
        if folder in replaced:
            continue
        # Copies of a folder have the same worker name; the folder's name distinguishes them.
        key = (entries[0].run, entries[0].worker)
        if key in workers:
            key = (key[0], f"{key[1]} ({folder.rpartition('/')[2]})")
        entries = [
            entry if (entry.run, entry.worker) == key else replace(entry, run=key[0], worker=key[1])
            for entry in entries
        ]
        workers[key] = sorted(entries, key=lambda entry: (entry.metadata.window, entry.metadata.step))
    return Listing(workers, tuple(problems))


def _not_recorded(listing: Listing, run: str, worker: str, step: int, window: int | None) -> NotRecordedError:
    runs = sorted({name for name, _ in listing.workers})
    workers = sorted(name for of, name in listing.workers if of == run)
    if run not in runs:
        return NotRecordedError(f"Run {run!r} has no recording.", where="run", fix=_choose(runs))
    if worker not in workers:
        return NotRecordedError(
            f"Run {run!r} has no worker {worker!r}.", where="worker", fix=_choose(workers)
        )
    recorded = [entry.metadata for entry in listing.workers[run, worker]]
    windows = [str(metadata.window) for metadata in recorded if metadata.step == step]
    if windows:
        return NotRecordedError(f"Window {window} has no step {step}.", where="window", fix=_choose(windows))
    steps = [str(metadata.step) for metadata in recorded]
    return NotRecordedError(f"Step {step} was not recorded.", where=f"{run}: {worker}", fix=_choose(steps))


def _choose(names: list[str]) -> str:
    shown = ", ".join(names[:20]) + (", …" if len(names) > 20 else "")
    return f"Choose one of: {shown}." if names else "Record one with memory_trace_handler."
