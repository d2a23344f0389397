"""Run a whole program inside an estimate, unchanged: `python train.py ARGS`, `-m package`, `torchrun ...`."""

from __future__ import annotations

import _thread
import multiprocessing.util
import os
import signal
import sys
import sysconfig
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from multiprocessing.process import BaseProcess
from pathlib import Path
from shutil import which
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import Any, NoReturn, Protocol

import torch

from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.answer.workload import errors_as_refusals
from tb_memplugin.estimate.run.fake_cuda import FakeGraph
from tb_memplugin.estimate.run.patches import replaced
from tb_memplugin.main_module import run_as_main
from tb_memplugin.record.optimizer_hooks import StepHooks

STEPS = 3
"""Optimizer steps after which a program is ended: from the second one on, the optimizer has its state."""

WARM_UP = 11
"""More steps that a program may take beside the default stream, where it warms up before it captures a CUDA
graph: so many PyTorch asks for with DDP (docs/source/notes/cuda.rst)."""

LIMIT_S = 600
"""Seconds after which a program that has not stepped often enough is ended."""

TERMINATED = 128 + signal.SIGTERM
"""The status with which the command exits on SIGTERM."""

INSISTS = 10
"""How often a program is then ended again, a second after it caught it, before its process is ended."""

LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
IMPORTED_BEFORE = ("safetensors.torch", "torch.distributed.checkpoint")
"""Libraries whose corrections apply only if they are imported before the program."""

_LIBRARIES = {sysconfig.get_path("stdlib"), str(Path(__file__).parents[2])}
_LIBRARIES |= {entry for entry in sys.path if any(Path(entry).glob("*.dist-info"))}
"""Folders of Python, of this package, and of what is installed, be it by the user or behind PYTHONPATH."""

_EXIT = os._exit

_OF_A_PROGRAM = (
    "If it fails without the estimate, too, mend that first; else docs/estimate.md says what an estimate "
    "cannot do."
)

USAGE = "Write what you would type to train: tb-memplugin estimate -- python train.py ARGS"


@dataclass(frozen=True, slots=True)
class Program:
    """A Python program as it is started.

    `main` is the path of a script, folder or archive, or the name of a module where `is_module`. `ranks` is
    the number of processes that a launcher or the program itself would start, None where there is no process
    group, and `ranks_per_node` those on one node.
    """

    main: str
    arguments: tuple[str, ...]
    is_module: bool = False
    ranks: int | None = None
    ranks_per_node: int = 1

    @property
    def name(self) -> str:
        """The name for reports and errors."""
        return f"-m {self.main}" if self.is_module else self.main


class StepRecorder(Protocol):
    """What records a program, and is told where its steps end."""

    def step(self) -> None:
        """End a training step."""


@dataclass(slots=True)
class Ending:
    """How a program went: its optimizer steps, one sentence why it ended, and others for the reader."""

    steps: int = 0
    why: str = "The program ran to its end"
    notes: list[str] = field(default_factory=list)
    is_over: bool = False

    def end(self, why: str) -> NoReturn:
        """Unwind the program; if it has caught that before, also from its next line, as in its `except:`.

        Raises:
            ProgramEnded: always.
        """
        if self.is_over:
            frame: FrameType | None = sys._getframe(1)
            while frame is not None:
                frame.f_trace = _end_here(frame, "call", None)
                frame = frame.f_back
            sys.settrace(_end_here)
        else:
            self.is_over, self.why = True, why
        raise ProgramEnded


class ProgramEnded(BaseException):
    """Unwinds a program that has run long enough; not an `Exception`, which programs catch and go on."""


def _end_here(frame: FrameType, event: str, _argument: object) -> Any:
    """Trace the program's own lines, and raise `ProgramEnded` at the first; Python then ends the tracing."""
    if not _is_own(frame.f_code.co_filename):
        return None
    if event == "line":
        raise ProgramEnded
    return _end_here


class StartsRanks(BaseException):
    """Unwinds a program that makes itself one of several ranks: it has to run as such from its beginning."""

    def __init__(self, ranks: int) -> None:
        super().__init__(ranks)
        self.ranks = ranks


def read_program(words: Sequence[str]) -> Program:
    """Return the program that a command line starts.

    Args:
        words: `python [-u] SCRIPT ARGS`, `python -m MODULE ARGS`, `torchrun [OPTIONS] SCRIPT ARGS`, `SCRIPT`.

    Raises:
        MemPluginError: the words start no Python program, or the script does not exist.
    """
    rest = list(words)
    if rest and Path(rest[0]).name.startswith("python"):
        rest.pop(0)
        while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
            rest.pop(0)
    if rest[:1] == ["-c"]:
        raise MemPluginError("A program given as text cannot be estimated.", where="-c", fix=USAGE)
    is_module = rest[:1] == ["-m"]
    if is_module:
        rest.pop(0)
    if not rest:
        raise MemPluginError("There is no program to estimate.", where="--", fix=USAGE)
    if Path(rest[0]).name in LAUNCHERS:
        return _launched(rest[1:])
    if not is_module and not Path(rest[0]).exists():
        if which(rest[0]) or "=" in rest[0]:
            raise MemPluginError(
                "It is no Python script, and what another program starts is not estimated.",
                where=rest[0],
                fix=f"Write it before tb-memplugin, or only the script that it starts. {USAGE}",
            )
        raise MemPluginError("There is no such script.", where=rest[0], fix=USAGE)
    return Program(rest[0], tuple(rest[1:]), is_module)


def _launched(words: Sequence[str]) -> Program:
    """Return the program that torchrun starts, with the number of its processes on all nodes."""
    from torch.distributed.run import get_args_parser

    try:
        options = get_args_parser().parse_args(list(words))
    except SystemExit as error:
        raise MemPluginError("torchrun does not take these options.", where="torchrun", fix=USAGE) from error
    nodes = str(options.nnodes).partition(":")[0]
    per_node = str(options.nproc_per_node)
    if not nodes.isdecimal() or not per_node.isdecimal():
        raise MemPluginError(
            f"The number of processes is not known: {nodes} nodes of {per_node}.",
            where="torchrun",
            fix="Give numbers: torchrun --nnodes 1 --nproc-per-node 8 train.py",
        )
    if not options.module and not Path(options.training_script).is_file():
        raise MemPluginError("There is no such script.", where=options.training_script, fix=USAGE)
    arguments = tuple(options.training_script_args)
    ranks = int(nodes) * int(per_node)
    return Program(options.training_script, arguments, bool(options.module), ranks, int(per_node))


def run_program(
    program: Program,
    recorder: StepRecorder,
    *,
    steps: int = STEPS,
    limit_s: int = LIMIT_S,
    rank: int = 0,
    where: str = "on fake tensors",
) -> Ending:
    """Run a program as the main module, until it has stepped often enough.

    The first optimizer that steps counts the steps. What the program saves goes nowhere.

    Args:
        program: what to run, on this thread.
        recorder: what records it: an entered estimator, for fake tensors.
        steps: optimizer steps after which the program is ended.
        limit_s: seconds after which it is ended all the same; ignored outside the main thread.
        rank: the rank that the environment tells the program where it has several.

    Raises:
        MemPluginError: the program failed, or cannot run there; it names the line.
    """
    ending = Ending()
    counting = _StepCount(ending, recorder, steps)
    with (
        _children_ended(),
        _as_started(program, rank),
        _stepped(counting),
        _ended_in_time(ending, program.name, limit_s),
        errors_as_refusals(program.name, "run", where, _OF_A_PROGRAM),
    ):
        try:
            run_as_main(program.main, program.arguments, is_module=program.is_module)
        except ProgramEnded:
            pass
        except KeyboardInterrupt as stopped:
            ending.why = f"The program was interrupted at {_raised_at(stopped)}"
        except SystemExit as leaving:
            if leaving.code not in (None, 0):
                raise _failed(program, leaving) from leaving
        except ImportError as error:
            if list(walk_tb(error.__traceback__))[-1][0].f_globals.get("__name__") == "runpy":
                raise MemPluginError(f"{error}.", where=program.name, fix=USAGE) from error
            raise
        finally:
            if ending.is_over:
                sys.settrace(None)
    return ending


def _failed(program: Program, leaving: SystemExit) -> MemPluginError:
    """Return the error for a program that has exited with a status or a text of its own."""
    if leaving.code == TERMINATED:
        return MemPluginError(
            "The estimate was terminated.", where=f"{program.name}, at {_raised_at(leaving)}"
        )
    return MemPluginError(
        f"The program has exited with {leaving.code!r}.",
        where=f"{program.name}, at {_raised_at(leaving)}",
        fix="Give it what it needs to train; what it printed may say more.",
    )


def import_libraries() -> None:
    """Import what corrections look for; called before the estimator is entered."""
    for name in IMPORTED_BEFORE:
        with suppress(ImportError):
            import_module(name)


@contextmanager
def _as_started(program: Program, rank: int) -> Iterator[None]:
    """Give the process an import path and a rank's environment, and restore what the program changes."""
    arguments, path, main = sys.argv, list(sys.path), sys.modules["__main__"]
    environment, imported, folder = dict(os.environ), set(sys.modules), Path.cwd()
    sys.path.insert(0, str(folder))
    if program.ranks is not None:
        node, local = divmod(rank, program.ranks_per_node)
        variables = {"RANK": rank, "WORLD_SIZE": program.ranks, "GROUP_RANK": node}
        variables |= {"LOCAL_RANK": local, "LOCAL_WORLD_SIZE": program.ranks_per_node}
        os.environ |= {name: str(number) for name, number in variables.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "estimate"}
        os.environ.setdefault("MASTER_PORT", "29500")
    try:
        yield
    finally:
        os.chdir(folder)
        sys.argv, sys.modules["__main__"] = arguments, main
        sys.path[:] = path
        os.environ.clear()
        os.environ |= environment
        for name in _own_modules(program, path, set(sys.modules) - imported):
            del sys.modules[name]  # its tensors belong to this estimate


def _own_modules(program: Program, path: Sequence[str], names: Iterable[str]) -> list[str]:
    """Return those of the names that are modules of the program's folder, but not of libraries within it."""
    folder = Path.cwd() if program.is_module else Path(program.main).resolve().parent
    libraries = [entry for entry in map(Path, path) if folder in entry.parents]
    files = {name: getattr(sys.modules[name], "__file__", None) or "<" for name in names}
    return [
        name
        for name, file in files.items()
        if _is_own(file)
        and folder in Path(file).parents
        and not any(map(Path(file).is_relative_to, libraries))
    ]


class _StepCount:
    """Counts the steps of the first optimizer that steps, and ends the program after so many."""

    def __init__(self, ending: Ending, recorder: StepRecorder, steps: int) -> None:
        self._ending, self._recorder, self._steps = ending, recorder, steps
        self._counting: weakref.ref[torch.optim.Optimizer] | None = None
        self._is_captured = False

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._counting is None:
            self._counting = weakref.ref(optimizer)  # the program may be done with it, as after a fold
        if optimizer is self._counting():
            self._is_captured = torch.cuda.is_current_stream_capturing()
            beside = torch.cuda.current_stream() != torch.cuda.default_stream()
            self._count(self._steps + WARM_UP if beside else self._steps)

    def replayed(self) -> None:
        """Count a replay of a CUDA graph in which the optimizer stepped."""
        if self._is_captured:
            self._count(self._steps)

    def _count(self, most: int) -> None:
        self._ending.steps += 1
        self._recorder.step()
        if self._ending.steps >= most:
            self._ending.end(f"The program was ended after {self._ending.steps} optimizer steps")


@contextmanager
def _children_ended() -> Iterator[None]:
    """End processes that the program left behind; a fork of this process that comes this far ends, too.

    Threads that it leaves behind are not waited for: what would end them is in the part that does not run.
    """
    forked: list[int] = []
    fork, exit_at_once, process, start = os.fork, os._exit, os.getpid(), threading.Thread.start
    create = BaseProcess.__init__

    def forks() -> int:
        child = fork()
        forked.append(child)
        return child

    def creates(child: BaseProcess, *args: Any, **options: Any) -> None:
        multiprocessing.util.get_temp_dir()  # the children's, too: it goes with this process
        create(child, *args, **options)

    def starts(thread: threading.Thread) -> None:
        thread.daemon = True
        start(thread)

    changes = (os, "fork", forks), (threading.Thread, "start", starts), (BaseProcess, "__init__", creates)
    before = set(multiprocessing.active_children())
    try:
        with replaced(*changes):
            yield
    finally:
        if os.getpid() != process:
            exit_at_once(0)
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()
        for number in forked:
            with suppress(OSError):  # it has ended, and somebody has waited for it
                if os.waitpid(number, os.WNOHANG) == (0, 0):
                    os.kill(number, signal.SIGTERM)


@contextmanager
def _stepped(counting: _StepCount) -> Iterator[None]:
    hooks, exit_at_once, process = StepHooks(None, counting, ends=True), os._exit, os.getpid()

    def leave(status: int) -> NoReturn:
        if os.getpid() != process:  # a worker of a data loader
            exit_at_once(status)
        raise ProgramEnded

    def refused(execute: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
        def run(file: Any, *arguments: Any) -> NoReturn:
            if os.getpid() != process:
                execute(file, *arguments)
            raise MemPluginError(
                f"The program replaces itself by os.{execute.__name__}, and the estimate with it.",
                where=_place(walk_stack(None)),
                fix="Set the environment or options for which it does that before you start the estimate.",
            )

        return run

    executing = [(os, name, refused(getattr(os, name))) for name in ("execv", "execve")]
    try:
        with replaced(
            *executing, (os, "_exit", leave), (FakeGraph, "replayed", staticmethod(counting.replayed))
        ):
            yield
    finally:
        hooks.remove()


@contextmanager
def as_one_rank(program: Program, rank: int = 0) -> Iterator[list[str]]:
    """Run one of the processes that a program spawns, as one rank of them all.

    Yields:
        notes for the reader, once the program has run.

    Raises:
        StartsRanks: the program makes itself one of several ranks, and was not started as one.
    """
    notes: list[str] = []

    def init_process_group(*_: Any, world_size: int = -1, **__: Any) -> NoReturn:
        raise StartsRanks(world_size if world_size > 0 else int(os.environ.get("WORLD_SIZE", "1")))

    def spawn(function: Callable[..., object], args: Sequence[Any] = (), nprocs: int = 1, **_: Any) -> None:
        if program.ranks is None:
            raise StartsRanks(nprocs)
        notes.append(f"Of the {nprocs} processes that the program spawns, the first is estimated.")
        function(rank, *args)

    changes: list[tuple[object, str, object]] = [(torch.multiprocessing, "spawn", spawn)]
    if program.ranks is None and torch.distributed.is_available():
        for module in (torch.distributed, torch.distributed.distributed_c10d):
            changes.append((module, "init_process_group", init_process_group))
    with replaced(*changes):
        yield notes


@contextmanager
def _ended_in_time(ending: Ending, name: str, limit_s: int) -> Iterator[None]:
    """End the program after so many seconds, wherever it is, and each second again; at last the process.

    Not by SIGALRM, which programs use themselves, nor by a `threading.Thread`, which they might wait for.
    """
    main = threading.main_thread()
    number = int(getattr(signal, "SIGRTMAX", getattr(signal, "SIGALRM", 0)))
    if threading.current_thread() is not main or not hasattr(signal, "pthread_kill"):
        yield
        return

    def end(_number: int, frame: FrameType | None) -> NoReturn:
        steps = f"{ending.steps} optimizer steps"
        ending.end(
            f"The program was ended at {_place(walk_stack(frame))}, after {limit_s} seconds and {steps}"
        )

    def wait() -> None:
        for seconds in (limit_s, *[1] * INSISTS):
            if over.acquire(timeout=seconds):
                waited.release()
                return
            signal.pthread_kill(main.ident or 0, number)
        text = f"error: {ending.why}, but it catches that and goes on.\n  where: {name}\n"
        os.write(2, f"{text}  fix: Write `except Exception:` in place of `except:` there.\n".encode())
        _EXIT(2)

    over, waited = _thread.allocate_lock(), _thread.allocate_lock()
    over.acquire()
    waited.acquire()
    before = signal.signal(number, end)
    _thread.start_new_thread(wait, ())
    try:
        yield
    finally:
        signal.signal(number, signal.SIG_IGN)
        over.release()
        waited.acquire()
        signal.signal(number, before)


def _raised_at(error: BaseException) -> str:
    """Return the program's own line from which an error came."""
    return _place(reversed(list(walk_tb(error.__traceback__))))


def _place(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Return the file and line of the innermost frame that is the program's own, such as `train.py:42`."""
    positions = [(frame.f_code.co_filename, line) for frame, line in frames]
    file, line = next((position for position in positions if _is_own(position[0])), positions[0])
    return f"{Path(file).name}:{line}"


@lru_cache(maxsize=1024)
def _is_own(file: str) -> bool:
    """Whether a file is the program's own."""
    return not file.startswith("<") and not any(map(Path(file).is_relative_to, _LIBRARIES))
