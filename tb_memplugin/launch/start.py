"""Begin to record this process as the environment asks, once it imports torch.

The package's start file (`tb_memplugin.pth`) imports this module in each Python process in whose environment
TB_MEMPLUGIN is set. Nothing heavy may be imported here.
"""

from __future__ import annotations

import atexit
import errno
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

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


SUMMARY_SECONDS = 60
"""How long the summary at the end may take."""

_begun: list[Settings] = []
_at_end: list[Callable[[], int | None]] = []
"""What ends the recorder and returns its number of steps: torch, imported before this module, has Python tell
first and end that later.
"""


def begin() -> None:
    """Begin to record this process. Does nothing if it has begun, or if TB_MEMPLUGIN is not set."""
    if _begun:
        return
    is_told = (
        OWNER in os.environ
    )  # by the command; of other programs that do not train there is nothing to tell
    try:
        settings = from_environment()
    except MemPluginError as error:
        _say(f"nothing is recorded. {error}\n")
        return
    if settings is None:
        return
    _begun.append(settings)
    if settings.owner == os.getpid() and os.environ.get("RANK", "0") == "0":
        atexit.register(_tell, settings, is_told=is_told)
    if "torch" in sys.modules:
        _record(settings)
    else:
        sys.meta_path.insert(0, _BeforeTorch(settings))


class _BeforeTorch(MetaPathFinder):
    """Finds torch as the other finders would, and begins to record when it has been imported.

    Programs may look for torch before they import it, as transformers and vLLM do, so it stays until then.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return torch's spec, whose loader begins to record afterwards; None for all other modules."""
        if fullname != "torch":
            return None
        finders = [each for each in sys.meta_path if each is not self and hasattr(each, "find_spec")]
        spec = next(filter(None, (each.find_spec(fullname, path, target) for each in finders)), None)
        if spec is None or spec.loader is None:
            return spec
        loader = spec.loader
        execute = loader.exec_module

        def execute_and_record(module: ModuleType) -> None:
            del loader.exec_module  # the loader's own again
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            execute(module)
            _record(self._settings)

        loader.exec_module = execute_and_record  # type: ignore[method-assign]
        return spec


def _record(settings: Settings) -> None:
    """Begin to record; an error is told and ends only that."""
    try:
        from tb_memplugin.launch.recorder import ProgramRecorder

        recorder = ProgramRecorder(settings)
        _at_end.append(recorder.end)
        recorder.begin()
    except Exception as error:  # noqa: BLE001  # the program goes on, whatever happens to us
        kind = "" if isinstance(error, MemPluginError) else f"{type(error).__name__}: "
        _say(f"nothing is recorded. {kind}{error}\n")


def _say(text: str) -> None:
    """Write to stderr, where one is open. That this fails does not change the exit code of the program."""
    if sys.stderr is None:
        return
    try:
        sys.stderr.write(f"tb-memplugin: {text}")
        sys.stderr.flush()
    except ValueError:  # the program has closed it
        pass
    except OSError:
        sys.stderr = None  # what it holds still cannot be written: Python would fail again at exit


def _why_nothing(steps: int) -> str:
    if "torch" not in sys.modules:
        return "The program did not import torch."
    if steps:
        return f"{steps:,} steps were seen, but nothing could be written: see the warning above."
    return "No optimizer of torch has stepped; without one, no module with parameters was called."


_REFUSED = re.compile(r"DefaultCPUAllocator: .*you tried to allocate (\d+) bytes")
"""What torch says where the host has no memory left (c10/core/impl/alloc_cpu.cpp of torch 2.6 to 2.13)."""


def _failed_request() -> list[str]:
    """Return the summary's option about the request for the host's memory that ended the program, if one did.

    What a GPU refuses is in the dump of `record_on_oom`.
    """
    error = getattr(sys, "last_value", None)
    refused = _REFUSED.search(str(error)) if isinstance(error, RuntimeError) else None
    if error is None or refused is None:
        return []
    from traceback import walk_tb

    torch = tuple(sys.modules["torch"].__path__)
    calls = [(frame.f_code, line) for frame, line in walk_tb(error.__traceback__)]
    code, line = next(call for call in reversed(calls) if not call[0].co_filename.startswith(torch))
    return ["--failed", refused[1], f"{Path(code.co_filename).name}:{line} ({code.co_name})"]


def _may_be_there(folder: str) -> bool:
    """Whether there is a folder, or a file system does not answer; the summary then says why."""
    try:
        return stat.S_ISDIR(Path(folder).stat().st_mode)
    except OSError as error:
        return error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)


def _tell(settings: Settings, *, is_told: bool) -> None:
    """Print what was recorded to stderr. Another process reads it, so that this one needs no more memory."""
    if os.getpid() != settings.owner:  # a fork that ran to its end
        return
    steps = sum(end() or 0 for end in _at_end)
    if "://" not in settings.folder and not _may_be_there(settings.folder):
        if is_told:
            _say(f"nothing was recorded. {_why_nothing(steps)}\n")
        return
    environment = {name: value for name, value in os.environ.items() if not name.startswith(LOGDIR)}
    command = [sys.executable, "-m", "tb_memplugin", "summary", settings.folder, "--logdir", settings.logdir]
    try:
        command += _failed_request()
        result = subprocess.run(
            command, env=environment, capture_output=True, timeout=SUMMARY_SECONDS, check=False
        )
        text = (result.stdout + result.stderr).decode("utf-8", "replace").removeprefix("tb-memplugin: ")
    except Exception as error:  # noqa: BLE001  # the end of the program is its own
        text = (
            f"see what was recorded with: tb-memplugin summary {settings.folder} ({type(error).__name__})\n"
        )
    _say(text)


begin()
