"""`--scheduler ADDRESS`: the files of a command are read by the workers of a Dask cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import click

from tb_memplugin.errors import MemPluginError
from tb_memplugin.store import files

Result = TypeVar("Result")

SECONDS_TO_CONNECT = 30

option = click.option(
    "--scheduler",
    metavar="ADDRESS",
    help="A Dask scheduler, as tcp://HOST:PORT: its workers read the files, which they and you must see "
    "under the same paths.",
)


def read_on(
    scheduler: str, sources: Sequence[str], work: Callable[[str], Result]
) -> Iterator[tuple[str, Result | MemPluginError]]:
    """What `work` makes of each source on a worker of a Dask cluster, in the order in which they end.

    Args:
        scheduler: where the scheduler listens.
        sources: paths or URLs; local paths are made absolute, as workers have folders of their own.
        work: a function that can be pickled, and so can what it returns.

    Raises:
        MemPluginError: Dask is not installed, or no scheduler answers.
    """
    with _client(scheduler) as client:
        from distributed import as_completed

        there = {_absolute(source): source for source in sources}
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
    try:
        return Client(scheduler, timeout=SECONDS_TO_CONNECT, set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        raise MemPluginError(
            f"No Dask scheduler answers: {error}.",
            where=f"--scheduler {scheduler}",
            fix="Start one with `dask scheduler`, and workers with `dask worker ADDRESS`.",
        ) from error


def _absolute(source: str) -> str:
    return source if files.is_remote(source) else os.path.abspath(source)  # noqa: PTH100  # links stay links


def _outcome(future: Any) -> Any:
    """A future's result, or why there is none: a refusal as it is, anything else as one."""
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, MemPluginError):
        return error
    return MemPluginError(
        f"The worker failed: {type(error).__name__}: {error}.",
        where="--scheduler",
        fix="Look into its log. Workers need this tb_memplugin and the same folders.",
    )
