"""Work on files side by side, in processes that are held to a budget and replaced if a file ends them."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection, get_all_start_methods, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

from tb_memplugin.budget import OverBudgetError, confine, out_of_memory
from tb_memplugin.commands.apart import Opened, ended_by
from tb_memplugin.errors import MemPluginError, UnreadableFileError

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
        sources: paths or URLs.
        work: the function. Its results, and where processes are not forked itself, must be picklable.
        jobs: the number of processes.
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
    def start(cls, work: Work[Result], jobs: int, others: Sequence[Connection]) -> _Job[Result]:
        pipe, far = (context := get_context("fork" if _can_fork() else None)).Pipe()
        opened = Opened()
        theirs = [pipe, *others] if _can_fork() else []  # else they would keep each other from ending
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
    others: Sequence[Connection],
    work: Work[Any],
    report: Callable[[str, int], None],
    jobs: int,
) -> None:
    """In the new process: work on what comes through the pipe, until it is closed."""
    for other in others:
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
        return MemPluginError(message, where=source, fix="Check that this machine can reach it.")
