"""The option `--scheduler ADDRESS`: read the files of a command on the workers of a Dask cluster."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import click

from tb_memplugin.errors import MemPluginError
from tb_memplugin.store import files

Result = TypeVar("Result")

SECONDS_TO_CONNECT = 30
_ADDRESS = re.compile(r"://|:[0-9]+\Z")

option = click.option(
    "--scheduler",
    metavar="ADDRESS",
    help=(
        "Read the files on the workers of this Dask scheduler, given as tcp://HOST:PORT. They must see "
        "the files under the same paths as you."
    ),
)


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
