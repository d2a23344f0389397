"""`tb-memplugin import`: put snapshots and traces into a logdir for the Memory tab."""

from __future__ import annotations

import json
import os
import re
import shlex
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import click

from tb_memplugin.analysis.units import size_text
from tb_memplugin.commands.opening import Reading, load_file, reading_options
from tb_memplugin.commands.options import PATH, json_option
from tb_memplugin.commands.tables import printable, refusal
from tb_memplugin.errors import MemPluginError
from tb_memplugin.read.content import STDIN
from tb_memplugin.store import files
from tb_memplugin.store.imports import write_import
from tb_memplugin.store.paths import SIDE_FOLDER, folder_name, readable

ENDINGS = (".gz", ".pickle", ".pkl", ".json", ".raw", ".trace", ".pt", ".mem")
"""Endings that are removed from a file's name, because they only say which format it has."""


@dataclass(frozen=True, slots=True)
class _Imported:
    file: str
    run: str
    worker: str
    folder: str
    steps: int
    peaks: dict[str, int]
    replaced: bool


_IN_JSON = ("file", "run", "worker", "folder", "steps", "replaced")


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
    as_json: bool,
    scheduler: str | None,
    reading: Reading,
) -> None:
    """Put files into a logdir, so that the Memory tab shows them.

    FILE is a memory snapshot (pickle or JSON), a Kineto trace, a raw memory timeline, each also as .gz,
    or a recorded window. Importing a file again replaces its earlier import in that run. If a file cannot
    be imported, the others still are, and the exit code is 2.
    """
    imported: list[_Imported] = []
    failed: list[tuple[str, MemPluginError]] = []
    wanted = list(dict.fromkeys(match for source in sources for match in files.matching(source)))
    for source, outcome in _outcomes(wanted, logdir, run, reading, scheduler):
        if isinstance(outcome, MemPluginError):
            failed.append((source, outcome))
            click.echo(refusal(outcome), err=True)
        else:
            imported.append(outcome)
    if as_json:
        click.echo(json.dumps(_document(imported, failed), indent=2))
    elif imported:
        _show(imported, logdir)
    if failed:
        raise SystemExit(2)


def _outcomes(
    sources: Sequence[str], logdir: str, run: str | None, reading: Reading, scheduler: str | None
) -> Iterator[tuple[str, _Imported | MemPluginError]]:
    """Yield the outcome of each file: in order on this machine, or on a cluster as workers finish."""
    work = partial(_import, logdir=logdir, run=run, reading=reading)
    if scheduler is not None:
        work = partial(_import, logdir=absolute(logdir), run=run, reading=reading)
        for source, outcome in read_on(scheduler, sources, work):
            yield source, outcome if isinstance(outcome, MemPluginError) else replace(outcome, file=source)
        return
    for source in sources:
        try:
            yield source, work(source)
        except MemPluginError as error:
            yield source, error


def _import(source: str, logdir: str, run: str | None, reading: Reading) -> _Imported:
    name = "stdin" if source == STDIN else worker_name(source)
    run_name = name if run is None else run
    trace = load_file(source, reading)
    origin = f"{STDIN} {uuid.uuid4()}" if source == STDIN else absolute(source)
    done = write_import(files.join(logdir, *run_folders(run_name)), name, origin, trace)
    written = done.written
    if written.worker != name:
        warning = (
            f"{source}: another file in this run is already named {name!r}, so this one became worker "
            f"{written.worker!r}."
        )
        click.echo(printable(warning), err=True)
    return _Imported(
        file=source,
        run="/".join(run_folders(run_name)),
        worker=written.worker,
        folder=written.folder,
        steps=len(written.steps),
        peaks={device.name: int(trace.live(row).max()) for row, device in enumerate(trace.devices)},
        replaced=done.replaced,
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


def _document(imported: Sequence[_Imported], failed: Sequence[tuple[str, MemPluginError]]) -> dict[str, Any]:
    return {
        "imported": [
            {
                **{field: getattr(item, field) for field in _IN_JSON},
                "devices": [{"device": name, "peak_bytes": peak} for name, peak in item.peaks.items()],
            }
            for item in imported
        ],
        "failed": [
            {"file": file, "what": error.what, "where": error.where, "fix": error.fix}
            for file, error in failed
        ],
    }


def _show(imported: Sequence[_Imported], logdir: str) -> None:
    for item in imported:
        run = item.run if item.run.endswith(item.worker) else f"{item.run}, worker {item.worker}"
        peaks = ", ".join(f"{name} {size_text(peak)}" for name, peak in item.peaks.items())
        click.echo(
            printable(
                f"{'replaced' if item.replaced else 'imported'} {item.file}: run {run}; "
                f"peak {peaks or 'none: it has no device'}"
            )
        )
    click.echo(f"See it in the Memory tab: tensorboard --logdir {printable(shlex.quote(logdir))}")


Result = TypeVar("Result")

SECONDS_TO_CONNECT = 30
_ADDRESS = re.compile(r"://|:[0-9]+\Z")


def read_on(
    scheduler: str, sources: Sequence[str], work: Callable[[str], Result]
) -> Iterator[tuple[str, Result | MemPluginError]]:
    """Call `work` for each source on a Dask cluster, and yield (source, result) as workers finish.

    An error in `work` is yielded as a `MemPluginError` in place of the result.

    Args:
        scheduler: the address of the scheduler.
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
            yield futures[future], _outcome(future)


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


def _outcome(future: Any) -> Any:
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
