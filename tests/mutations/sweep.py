"""Read many damaged files, and collect what no damaged file may cause."""

from __future__ import annotations

import signal
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import FrameType

from tb_memplugin.errors import MemPluginError
from tests.mutations.kinds import KINDS, FileKind

LONGEST_SECONDS = 10
TOLD_LINES = 4
TOO_MUCH_MEMORY = "more memory"


class EndlessError(BaseException):
    """Reading a file has not ended in time."""


@dataclass(slots=True)
class Sweep:
    """How many damaged files were read, how many refused in words, and what was wrong with others."""

    read: int = 0
    refused: int = 0
    problems: list[str] = field(default_factory=list)


def check(kind: FileKind, content: bytes, folder: Path) -> str | None:
    """Read a file; return what was wrong with its reading, "" if it holds together, None if it is refused."""
    path = folder / kind.name
    path.write_bytes(content)
    begin = time.process_time()
    wrong: str | None
    try:
        wrong = kind.read(path)
    except MemPluginError as error:
        wrong = None if all((error.what, error.where, error.fix)) else f"an error without parts: {error!r}"
        if TOO_MUCH_MEMORY in error.what:
            wrong = error.what
    except (Exception, EndlessError) as error:  # noqa: BLE001  # what is looked for
        wrong = "".join(traceback.format_exception(error)[-TOLD_LINES:])
    if time.process_time() - begin > LONGEST_SECONDS:
        wrong = wrong or "it took too long"
    return wrong


def sweep(kind: FileKind, count: int, seed: int, folder: Path) -> Sweep:
    """Read damaged files; a problem begins with the number of the file, for `reproduced`."""
    done = Sweep()
    before = signal.signal(signal.SIGALRM, _end)
    try:
        for number in range(count):
            signal.alarm(3 * LONGEST_SECONDS)
            wrong = check(kind, kind.damaged(Random(f"{seed} {number}")), folder)
            if wrong:
                done.problems.append(f"{number}: {wrong}")
            elif wrong is None:
                done.refused += 1
            else:
                done.read += 1
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    return done


def reproduced(kind: str, seed: int, number: int) -> bytes:
    """Return the damaged file that a message names."""
    return KINDS[kind].damaged(Random(f"{seed} {number}"))


def _end(_number: int, _frame: FrameType | None) -> None:
    raise EndlessError
