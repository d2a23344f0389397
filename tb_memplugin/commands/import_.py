"""`tb-memplugin import`: put snapshots and traces into a logdir for the Memory tab.

Files are read side by side, in processes that are held to a budget and replaced if a file ends them.
"""

from __future__ import annotations

import glob
import json
import os
import re
import shlex
import signal
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from multiprocessing import connection, get_all_start_methods, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

import click

from tb_memplugin.analysis.units import size_text
from tb_memplugin.budget import OverBudgetError, confine, out_of_memory
from tb_memplugin.commands.apart import INTERRUPTED, REFUSED, Opened, ended_by
from tb_memplugin.commands.opening import Reading, print_shared_notes, read_file, reading_options
from tb_memplugin.commands.options import PATH, json_option
from tb_memplugin.commands.tables import files_text, printable, progress_bar, refusal
from tb_memplugin.errors import MemPluginError, UnreadableFileError
from tb_memplugin.read.content import STDIN
from tb_memplugin.store import files
from tb_memplugin.store.imports import imported_as, write_import
from tb_memplugin.store.paths import SIDE_FOLDER, folder_name, readable
from tb_memplugin.trace import Note

Result = TypeVar("Result")

Work = Callable[[str], Result]

TICK_SECONDS = 0.2
"""How often `outcomes` yields at least."""

PATIENCE_SECONDS = 1.5
"""How long a process may take to end; less than the command itself may take after Ctrl-C."""


def outcomes(
    sources: Sequence[str], work: Work[Result], jobs: int
) -> Iterator[tuple[str, Result | MemPluginError] | None]:
    """Call `work` for each source in `jobs` processes, and yield (source, result) as they finish.

    An error is yielded as a `MemPluginError` in place of the result. A source that crashes its process, or
    takes more time than the budget of its file, fails alone. The processes share the free memory; a source
    for which its share is too small is tried again at the end, when no other process runs. None is yielded
    when nothing has finished for `TICK_SECONDS`, so that the caller can show that time passes.

    Args:
        work: the function. Its results, and where processes are not forked itself, must be picklable.
    """
    waiting, alone = deque(sources), list[str]()
    team: list[_Job[Result]] = []
    try:
        while waiting or any(job.source is not None for job in team):
            while waiting and (idle := _idle(team, work, jobs)):
                idle.give(waiting.popleft())
            ready = connection.wait([job.pipe for job in team if job.source is not None], TICK_SECONDS)
            if not ready:
                yield None
            for job in [job for job in team if job.pipe in ready]:
                source, outcome = job.take()
                if not job.process.is_alive():
                    team.remove(job)
                if isinstance(outcome, OverBudgetError) and jobs > 1:
                    alone.append(source)
                else:
                    yield source, outcome
    finally:
        for job in team:
            job.interrupt()
        for job in team:
            job.end()
    if alone:
        yield from outcomes(alone, work, 1)


def _idle(team: list[_Job[Result]], work: Work[Result], jobs: int) -> _Job[Result] | None:
    """Return a process without work, started for it if there may be one more; None if all are at work."""
    for job in team:
        if job.source is None:
            return job
    if len(team) == jobs:
        return None
    job = _Job.start(work, jobs, [job.pipe for job in team])
    team.append(job)
    return job


@dataclass(slots=True)
class _Job(Generic[Result]):
    """A process, the pipe to it, the file that it opened last, and the source that it works on, if any."""

    process: BaseProcess
    pipe: Connection
    opened: Opened
    source: str | None = None

    @classmethod
    def start(cls, work: Work[Result], jobs: int, pipes: Sequence[Connection]) -> _Job[Result]:
        pipe, far = (context := get_context("fork" if _can_fork() else None)).Pipe()
        opened = Opened()
        theirs = [pipe, *pipes] if _can_fork() else []  # else they would keep each other from ending
        arguments = (far, theirs, work, opened.report if _can_fork() else _not_reported, jobs)
        process = context.Process(target=_serve, args=arguments, daemon=True)
        process.start()
        far.close()
        return cls(process, pipe, opened)

    def give(self, source: str) -> None:
        self.source = source
        with suppress(OSError):  # it has ended: `take` says so
            self.pipe.send(source)

    def take(self) -> tuple[str, Result | MemPluginError]:
        """Return the source and its outcome, when the pipe is ready."""
        source, self.source = self.source or "", None
        try:
            outcome: Result | MemPluginError = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            outcome = self._ended(source)
        return source, outcome

    def _ended(self, source: str) -> MemPluginError:
        code = self.process.exitcode or 0
        if code < 0:
            error = ended_by(-code, self.opened)
            return type(error)(error.what, where=source, fix=error.fix)
        return UnreadableFileError(
            f"The process that read the file failed (exit code {code}).",
            where=source,
            fix="Please report this, with the text above and, if you can, the file.",
        )

    def interrupt(self) -> None:
        """Let an idle process end, and interrupt one that works, as Ctrl-C does."""
        self.pipe.close()
        if self.source is not None and self.process.pid is not None and self.process.is_alive():
            os.kill(self.process.pid, signal.SIGINT)

    def end(self) -> None:
        self.process.join(PATIENCE_SECONDS)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _can_fork() -> bool:
    return "fork" in get_all_start_methods()


def _not_reported(_path: str, _seconds: int) -> None:
    """Where processes are not forked, they share no memory and have no limits of time."""


def _serve(
    pipe: Connection,
    pipes: Sequence[Connection],
    work: Work[Any],
    report: Callable[[str, int], None],
    jobs: int,
) -> None:
    """In the new process: work on what comes through the pipe, until it is closed."""
    for other in pipes:
        other.close()
    confine(report, jobs)
    with suppress(EOFError, KeyboardInterrupt, BrokenPipeError):
        while True:
            source = pipe.recv()
            pipe.send(_outcome(work, source))


def _outcome(work: Work[Result], source: str) -> Result | MemPluginError:
    try:
        return work(source)
    except MemPluginError as error:
        return error
    except MemoryError:
        return out_of_memory(source)
    except OSError as error:
        message = f"A file or its host cannot be reached: {error.strerror or error}."
        return _ForNowError(message, where=source, fix="Check that this machine can reach it.")


class _ForNowError(MemPluginError):
    """A file system failed: the same import may succeed later."""


ENDINGS = (".gz", ".pickle", ".pkl", ".json", ".raw", ".trace", ".pt", ".mem")
"""Endings that are removed from a file's name, because they only say which format it has."""


WATCH_SECONDS = 5
"""How often `--watch` looks. A file is imported when two looks in a row found the same size and time."""


@dataclass(frozen=True, slots=True)
class _Imported:
    file: str
    run: str
    worker: str
    folder: str
    steps: int
    peaks: dict[str, int]
    replaced: bool
    notes: tuple[Note, ...]


@dataclass(frozen=True, slots=True)
class _Unchanged:
    file: str
    run: str
    worker: str


_IN_JSON = ("file", "run", "worker", "folder", "steps", "replaced")

_Outcomes = dict[str, _Imported | _Unchanged | MemPluginError]
"""What became of each file; of a file that was tried again, the last."""


@dataclass(frozen=True, slots=True)
class _Target:
    """Where to, and how: the logdir, the name of the run, and whether to import again what is unchanged."""

    logdir: str
    run: str | None
    again: bool
    reading: Reading


@click.command("import")
@click.argument("sources", nargs=-1, type=PATH, required=True, metavar="FILE...")
@click.option(
    "--logdir",
    type=PATH,
    required=True,
    help="The folder that you give to tensorboard --logdir; created if it does not exist.",
)
@click.option(
    "--run", help="Name of the run; use / for nested runs. Default: one run per file, named after the file."
)
@click.option(
    "--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Number of files read at a time."
)
@click.option("--again", is_flag=True, help="Import files again that have not changed since their import.")
@click.option(
    "--watch",
    is_flag=True,
    help="Go on until Ctrl-C, and import files when they are there and whole; FILE may be a folder of dumps.",
)
@json_option("Print what was imported as JSON.")
@click.option(
    "--scheduler",
    metavar="ADDRESS",
    help=(
        "Read the files on the workers of this Dask scheduler, given as tcp://HOST:PORT. They must see "
        "the files under the same paths as you."
    ),
)
@reading_options
def command(
    sources: Sequence[str],
    logdir: str,
    run: str | None,
    jobs: int,
    again: bool,
    watch: bool,
    as_json: bool,
    scheduler: str | None,
    reading: Reading,
) -> None:
    """Put files into a logdir, so that the Memory tab shows them.

    FILE is a memory snapshot (pickle or JSON), a Kineto trace, a raw memory timeline, each also as .gz,
    or a recorded window; or a pattern in quotes. A file that changed since its import in that run replaces
    it; one that did not is left out: so an import that was killed goes on when it is started again. If a
    file cannot be imported, the others still are, and the exit code is 2.
    """
    target = _Target(absolute(logdir) if scheduler else logdir, run, again, reading)
    done: _Outcomes = {}
    interrupted = False
    try:
        if watch:
            _watch(sources, target, jobs, scheduler, done)
        else:
            listed = [path for source in sources for path in _listed([source]) or [source]]
            _import_all(list(dict.fromkeys(listed)), target, jobs, scheduler, done)
    except KeyboardInterrupt:
        interrupted = not watch
    failed = [(file, outcome) for file, outcome in done.items() if isinstance(outcome, MemPluginError)]
    print_shared_notes([(item.file, item.notes) for item in done.values() if isinstance(item, _Imported)])
    if as_json:
        click.echo(json.dumps(_document(done, failed), indent=2))
    else:
        _show(done, logdir)
    _show_failed(failed, len(done))
    if interrupted:
        click.echo("Interrupted. Give the same command to go on.", err=True)
        raise SystemExit(INTERRUPTED)
    if failed:
        raise SystemExit(REFUSED)


def _listed(sources: Iterable[str], *, of_folders: bool = False) -> dict[str, str]:
    """Return the files that paths, patterns and, if wanted, folders stand for, each with its state."""
    listed: dict[str, str] = {}
    for source in sources:
        if source == STDIN:
            listed[source] = ""
        elif of_folders and files.is_folder(source):
            states = files.states(files.join(glob.escape(source), "*"))
            listed |= {path: state for path, state in states.items() if path.lower().endswith(ENDINGS)}
        else:
            listed |= files.states(source)
    return listed


def _import_all(
    sources: Sequence[str], target: _Target, jobs: int, scheduler: str | None, done: _Outcomes
) -> None:
    """Import files, and enter the outcome of each when it is known."""
    work = partial(_import, target=target)
    if scheduler is not None:
        for source, outcome in read_on(scheduler, sources, work):
            done[source] = outcome if isinstance(outcome, MemPluginError) else replace(outcome, file=source)
        return
    with progress_bar("Importing", of_files=True) as bar:
        if STDIN in sources:  # other processes cannot read it
            try:
                done[STDIN] = work(STDIN)
            except MemPluginError as error:
                done[STDIN] = error
        listed = [source for source in sources if source != STDIN]
        finished = failed = 0
        for ended in outcomes(listed, work, jobs):
            if ended is not None:
                source, done[source] = ended
                finished, failed = finished + 1, failed + isinstance(done[source], MemPluginError)
            if bar is not None:
                text = f"Importing, {failed:,} failed" if failed else "Importing"
                bar(completed=finished, total=len(sources), description=text)


def _watch(
    sources: Sequence[str], target: _Target, jobs: int, scheduler: str | None, done: _Outcomes
) -> None:
    """Import files as they appear and change, until Ctrl-C, and again where a file system failed.

    Raises:
        OSError: a remote file system failed at the first look.
    """
    before: dict[str, str] = {}
    tried: dict[str, str] = {}
    now = _listed(sources, of_folders=True)
    failure = ""
    while True:
        complete = [
            path
            for path, state in now.items()
            if before.get(path) == state
            and tried.get(path) != state
            and (state or path.startswith(files.WEB))
        ]
        if complete:
            _import_all(complete, target, jobs, scheduler, done)
            tried |= {path: now[path] for path in complete if not isinstance(done[path], _ForNowError)}
        before = now
        time.sleep(WATCH_SECONDS)
        try:
            now, failure = _listed(sources, of_folders=True), ""
        except OSError as error:
            now = {}
            if not failure:
                failure = printable(f"{error.strerror or error}")
                click.echo(f"warning: what is watched cannot be listed ({failure}); it goes on.", err=True)


def _import(source: str, target: _Target) -> _Imported | _Unchanged:
    try:
        return _imported(source, target)
    except MemPluginError as error:
        if isinstance(error.__cause__, OSError):
            raise _ForNowError(error.what, where=error.where, fix=error.fix) from error
        raise


def _imported(source: str, target: _Target) -> _Imported | _Unchanged:
    name = "stdin" if source == STDIN else worker_name(source)
    folders = run_folders(name if target.run is None else target.run)
    run_folder, run = files.join(target.logdir, *folders), "/".join(folders)
    origin = f"{STDIN} {uuid.uuid4()}" if source == STDIN else absolute(source)
    state = "" if source == STDIN else files.states(source).get(source, "")
    if state:
        state = f"{state}-{target.reading.device_type}-{version('tb-memplugin')}"
        worker = None if target.again else imported_as(run_folder, name, origin, state)
        if worker is not None:
            return _Unchanged(source, run, worker)
    trace = read_file(source, target.reading)
    done = write_import(run_folder, name, origin, trace, state)
    written, notes = done.written, trace.notes
    if written.worker != name:
        message = f"another file in this run is already named {name!r}"
        notes = (Note(f"{message}, so this one became worker {written.worker!r}.", "worker_renamed"), *notes)
    return _Imported(
        file=source,
        run=run,
        worker=written.worker,
        folder=written.folder,
        steps=len(written.steps),
        peaks={device.name: int(trace.live(row).max()) for row, device in enumerate(trace.devices)},
        replaced=done.replaced,
        notes=notes,
    )


def worker_name(source: str) -> str:
    """Return the name of a file in the tab: its file name without the endings that say its format."""
    path = source.replace("\\", "/").rstrip("/")
    folder, _, name = path.rpartition("/")
    while True:
        stem = next((name[: -len(end)] for end in ENDINGS if name.lower().endswith(end)), name)
        if stem in (name, ""):
            break
        name = stem
    if folder.endswith(f"/{SIDE_FOLDER}"):  # a recorded window, whose file name is only a number
        name = f"{folder.removesuffix(f'/{SIDE_FOLDER}').rpartition('/')[2]}.{name}"
    return readable(name) or "import"


def run_folders(run: str) -> list[str]:
    """Return the nested folders of a run below the logdir, one for each part of its name.

    Every part becomes a single valid folder name, so that a run cannot leave the logdir.

    Raises:
        MemPluginError: the name is empty.
    """
    parts = [folder_name(part) for part in readable(run).split("/") if part]
    if not parts:
        raise MemPluginError("The run name is empty.", where="--run", fix="Give a name, or leave --run out.")
    return parts


def _document(done: _Outcomes, failed: Sequence[tuple[str, MemPluginError]]) -> dict[str, Any]:
    return {
        "imported": [
            {
                **{field: getattr(item, field) for field in _IN_JSON},
                "devices": [{"device": name, "peak_bytes": peak} for name, peak in item.peaks.items()],
            }
            for item in done.values()
            if isinstance(item, _Imported)
        ],
        "unchanged": [
            {"file": item.file, "run": item.run, "worker": item.worker}
            for item in done.values()
            if isinstance(item, _Unchanged)
        ],
        "failed": [
            {"file": file, "what": error.what, "where": error.where, "fix": error.fix}
            for file, error in failed
        ],
    }


def _show(done: _Outcomes, logdir: str) -> None:
    imported = [item for item in done.values() if isinstance(item, _Imported)]
    unchanged = [item for item in done.values() if isinstance(item, _Unchanged)]
    for item in imported:
        run = item.run if item.run.endswith(item.worker) else f"{item.run}, worker {item.worker}"
        peaks = ", ".join(f"{name} {size_text(peak)}" for name, peak in item.peaks.items())
        click.echo(
            printable(
                f"{'replaced' if item.replaced else 'imported'} {item.file}: run {run}; "
                f"peak {peaks or 'none: it has no device'}"
            )
        )
    if unchanged:
        click.echo(f"imported before, and not changed since: {files_text(len(unchanged))}")
    if imported or unchanged:
        click.echo(f"See it in the Memory tab: tensorboard --logdir {printable(shlex.quote(logdir))}")


def _show_failed(failed: Sequence[tuple[str, MemPluginError]], count: int) -> None:
    """Print what failed to stderr: one line for each of several files."""
    for file, error in failed:
        line = f"error: {file}: {error.what} {error.fix}".rstrip()
        click.echo(refusal(error) if count == 1 else printable(line), err=True)
    if len(failed) > 1:
        click.echo(f"{len(failed):,} of {files_text(count)} could not be imported.", err=True)


SECONDS_TO_CONNECT = 30
_ADDRESS = re.compile(r"://|:[0-9]+\Z")


def read_on(
    scheduler: str, sources: Sequence[str], work: Callable[[str], Result]
) -> Iterator[tuple[str, Result | MemPluginError]]:
    """Call `work` for each source on a Dask cluster, and yield (source, result) as workers finish.

    An error in `work` is yielded as a `MemPluginError` in place of the result.

    Args:
        sources: paths or URLs; local paths are made absolute, because workers have other working folders.
        work: the function to call. It and its results must be picklable.

    Raises:
        MemPluginError: Dask is not installed, or no scheduler answers.
    """
    with _client(scheduler) as client:
        from distributed import as_completed

        there = {absolute(source): source for source in sources}
        futures = {client.submit(work, path, pure=False): source for path, source in there.items()}
        for future in as_completed(futures, loop=client.loop):
            yield futures[future], _gathered(future)


def _client(scheduler: str) -> Any:
    try:
        from distributed import Client
    except ImportError as error:
        raise MemPluginError(
            "Dask is not installed here.", where="--scheduler", fix="pip install 'tb-memplugin[dask]'."
        ) from error
    if not _ADDRESS.search(scheduler):  # Dask would try it for a minute
        raise MemPluginError(
            "This is no address of a scheduler.",
            where=f"--scheduler {scheduler}",
            fix="Give what `dask scheduler` prints: tcp://HOST:PORT.",
        )
    try:
        return Client(scheduler, timeout=SECONDS_TO_CONNECT, set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        raise MemPluginError(
            f"Cannot reach a Dask scheduler: {error}.",
            where=f"--scheduler {scheduler}",
            fix="Start one with `dask scheduler`, and workers with `dask worker ADDRESS`.",
        ) from error


def absolute(source: str) -> str:
    """Return a path that does not depend on the working folder; a URL stays as it is."""
    return source if files.is_remote(source) else os.path.abspath(source)  # noqa: PTH100  # links stay links


def _gathered(future: Any) -> Any:
    """Return a future's result or its MemPluginError; any other error is converted to a MemPluginError."""
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, MemPluginError):
        return error
    return MemPluginError(
        f"The worker failed: {type(error).__name__}: {error}.",
        where="--scheduler",
        fix="Look at the worker's log. Workers need this version of tb_memplugin and the same folders.",
    )
