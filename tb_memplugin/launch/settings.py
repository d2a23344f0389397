"""What to record of a program, as environment variables, so that its child processes inherit it."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tb_memplugin.errors import MemPluginError
from tb_memplugin.main_module import CODE
from tb_memplugin.store.paths import folder_name

LOGDIR = "TB_MEMPLUGIN"
"""The variable that switches recording on: the logdir. Others begin with its name."""

RUN, OWNER = f"{LOGDIR}_RUN", f"{LOGDIR}_OWNER"
STEPS, SNAPSHOT, STACKS, SHAPES, EVERY_STEP, LOG_TO = (
    f"{LOGDIR}_{name}" for name in ("STEPS", "SNAPSHOT", "STACKS", "SHAPES", "EVERY_STEP", "LOG_TO")
)
TIME = "%Y%m%d-%H%M%S"
_UUID = re.compile("[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True, slots=True)
class Settings:
    """What to record.

    Attributes:
        logdir: a folder for TensorBoard: a local path, or a URL that fsspec opens.
        run: the run's folder, relative to the logdir: `train/20261125-221811`.
        owner: the id of the process that tells at its end what was recorded.
        steps: the numbers of the steps to record in full, None for the third and fourth of an optimizer or,
            if there is none, the first two calls of a model.
        snapshot: record the allocator's history in these steps, too.
        stacks: record Python stacks in these steps.
        shapes: record dtypes and shapes of tensors in these steps.
        every_step: keep figures of every step.
        log_to: the experiment trackers that get figures and reports.
    """

    logdir: str
    run: str
    owner: int
    steps: tuple[range, ...] | None = None
    snapshot: bool = False
    stacks: bool = True
    shapes: bool = False
    every_step: bool = True
    log_to: tuple[str, ...] = ()

    @property
    def folder(self) -> str:
        """The run's folder."""
        return f"{self.logdir.rstrip('/')}/{self.run}"


def from_environment(environment: MutableMapping[str, str] = os.environ) -> Settings | None:
    """Return what the environment asks for, None if TB_MEMPLUGIN is not set.

    Names the run and its owner in the environment if they have no name yet.

    Raises:
        MemPluginError: a variable has a value that is not understood.
    """
    logdir = environment.get(LOGDIR)
    if not logdir:
        return None
    if RUN not in environment:
        environment[RUN] = run_name(sys.argv[0] if sys.argv else "", environment)
        environment.setdefault(OWNER, str(os.getpid()))
    owner = environment.get(OWNER, "")
    return Settings(
        logdir,
        environment[RUN],
        int(owner) if owner.isdecimal() else 0,
        steps=read_steps(environment.get(STEPS, ""), STEPS),
        snapshot=_is_on(environment, SNAPSHOT, default=False),
        stacks=_is_on(environment, STACKS, default=True),
        shapes=_is_on(environment, SHAPES, default=False),
        every_step=_is_on(environment, EVERY_STEP, default=True),
        log_to=tuple(filter(None, environment.get(LOG_TO, "").split(","))),
    )


def read_steps(text: str, where: str) -> tuple[range, ...] | None:
    """Return the steps in a text such as `3:6` (3, 4 and 5), `10`, or `3:6,100`; None if it is empty.

    Raises:
        MemPluginError: the text is something else, or names no step.
    """
    steps = []
    for part in text.split(",") if text else ():
        first, colon, end = part.strip().partition(":")
        if not (first.isdecimal() and (end.isdecimal() or not colon)):
            raise _not_understood(text, where)
        steps.append(range(int(first), int(end) if colon else int(first) + 1))
    if not all(steps):
        raise _not_understood(text, where)
    return tuple(steps) or None


def run_name(program: str, environment: Mapping[str, str]) -> str:
    """Return a folder for a new run: the name of the program (a path), then when it began.

    The processes that torchrun starts at once get the same name: the id that torchrun was given, else when
    it began. On several hosts, which share no clock, it is torchrun's own id.
    """
    name = folder_name(Path(program).stem if program not in ("", *CODE) else "python")
    job = environment.get("TORCHELASTIC_RUN_ID")
    if job is None:
        return f"{name}/{datetime.now().astimezone().strftime(TIME)}"
    if job == "none" or _UUID.fullmatch(job):  # the ids that torchrun gives if it was given none
        address, port = environment.get("MASTER_ADDR", ""), environment.get("MASTER_PORT", "")
        began = _torchrun_began(environment)
        if began is not None:
            return f"{name}/{began.strftime(TIME)}-{port if job == 'none' else job[:4]}"
        job = f"{address}-{port}" if job == "none" else job
    return f"{name}/{folder_name(job)}"


def _torchrun_began(environment: Mapping[str, str]) -> datetime | None:
    """Return when torchrun made the folder of its first attempt, None if it runs on several hosts."""
    error_file = environment.get("TORCHELASTIC_ERROR_FILE")  # RUN/attempt_0/RANK/error.json
    if error_file is None or environment.get("GROUP_WORLD_SIZE") != "1":
        return None
    try:
        seconds = (Path(error_file).parents[2] / "attempt_0").stat().st_mtime
    except (OSError, IndexError):
        return None
    return datetime.fromtimestamp(seconds).astimezone()


def _is_on(environment: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = environment.get(name, "")
    if text not in ("", "0", "1"):
        raise MemPluginError(f"{text!r} is neither 0 nor 1.", where=name, fix="Set it to 0 or 1.")
    return text == "1" if text else default


def _not_understood(text: str, where: str) -> MemPluginError:
    return MemPluginError(
        f"{text!r} names no steps.", where=where, fix="Give a step, first:end, or several: 3:6,100"
    )
