"""Run a whole program inside an estimate, unchanged: `python train.py ARGS`, `-m package`, `torchrun ...`."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NoReturn, Protocol

import torch

from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.answer.workload import errors_as_refusals
from tb_memplugin.record.optimizer_hooks import StepHooks

STEPS = 3
"""Optimizer steps after which a program is ended: from the second one on, the optimizer has its state."""

LIMIT_S = 600
"""Seconds after which a program that has not stepped often enough is ended."""

LAUNCHERS = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
IMPORTED_BEFORE = ("safetensors.torch", "torch.distributed.checkpoint")
"""Libraries whose corrections apply only if they are imported before the program."""

USAGE = "Write what you would type to train: tb-memplugin estimate -- python train.py ARGS"


@dataclass(frozen=True, slots=True)
class Program:
    """A Python program as it is started.

    `main` is the path of a script, or the name of a module where `is_module`. `ranks` is the number of
    processes that a launcher would start, and `ranks_per_node` those on one node; 1 without a launcher.
    """

    main: str
    arguments: tuple[str, ...]
    is_module: bool = False
    ranks: int = 1
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
    """How a program went: its optimizer steps, and one sentence why it ended."""

    steps: int = 0
    why: str = "The program ran to its end"


class ProgramEnded(BaseException):
    """Unwinds a program that has run long enough; not an `Exception`, which programs catch and go on."""


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
    if not is_module and not Path(rest[0]).is_file():
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
        where: what it runs on, for errors.

    Raises:
        MemPluginError: the program failed, or cannot run there; it names the line.
    """
    ending = Ending()
    counting = _StepCount(ending, recorder, steps)
    with (
        _as_started(program, rank),
        _stepped(counting),
        _ended_in_time(ending, limit_s),
        errors_as_refusals(program.name, "run", where),
    ):
        try:
            _execute(program)
        except ProgramEnded:
            pass
        except KeyboardInterrupt:
            ending.why = f"The program was interrupted at {_place(sys.exc_info()[2])}"
        except SystemExit as leaving:
            if leaving.code not in (None, 0):
                raise
    return ending


def import_libraries() -> None:
    """Import what corrections look for; called before the estimator is entered."""
    for name in IMPORTED_BEFORE:
        with suppress(ImportError):
            import_module(name)


def _execute(program: Program) -> None:
    if program.is_module:
        runpy.run_module(program.main, run_name="__main__", alter_sys=True)
        return
    script = Path(program.main)
    module = ModuleType("__main__")
    vars(module).update(__file__=str(script), __builtins__=__builtins__)
    sys.modules["__main__"] = module
    exec(compile(script.read_bytes(), str(script), "exec"), vars(module))


@contextmanager
def _as_started(program: Program, rank: int) -> Iterator[None]:
    """Give the process the program's arguments, import path and main module, and a rank's environment."""
    arguments, path, main = sys.argv, list(sys.path), sys.modules["__main__"]
    environment = dict(os.environ)
    sys.argv = [program.main, *program.arguments]
    sys.path.insert(0, str(Path.cwd() if program.is_module else Path(program.main).resolve().parent))
    if program.ranks > 1:
        node, local = divmod(rank, program.ranks_per_node)
        variables = {"RANK": rank, "WORLD_SIZE": program.ranks, "GROUP_RANK": node}
        variables |= {"LOCAL_RANK": local, "LOCAL_WORLD_SIZE": program.ranks_per_node}
        os.environ |= {name: str(number) for name, number in variables.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "estimate"}
        os.environ.setdefault("MASTER_PORT", "29500")
    try:
        yield
    finally:
        sys.argv, sys.modules["__main__"] = arguments, main
        sys.path[:] = path
        os.environ.clear()
        os.environ |= environment


class _StepCount:
    """Counts the steps of the first optimizer that steps, and ends the program after so many."""

    def __init__(self, ending: Ending, recorder: StepRecorder, steps: int) -> None:
        self._ending, self._recorder, self._steps = ending, recorder, steps
        self._counting: torch.optim.Optimizer | None = None

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._counting is None:
            self._counting = optimizer
        if optimizer is not self._counting:
            return
        self._ending.steps += 1
        self._recorder.step()
        if self._ending.steps >= self._steps:
            self._ending.why = f"The program was ended after {self._ending.steps} optimizer steps"
            raise ProgramEnded


@contextmanager
def _stepped(counting: _StepCount) -> Iterator[None]:
    hooks, exit_at_once, process = StepHooks(_nothing, counting), os._exit, os.getpid()

    def leave(status: int) -> NoReturn:
        if os.getpid() != process:  # a worker of a data loader
            exit_at_once(status)
        raise ProgramEnded

    os._exit = leave
    try:
        yield
    finally:
        os._exit = exit_at_once
        hooks.remove()


@contextmanager
def _ended_in_time(ending: Ending, limit_s: int) -> Iterator[None]:
    """End the program after so many seconds, wherever it is."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return

    def end(_number: int, frame: FrameType | None) -> NoReturn:
        where = f" at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame is not None else ""
        steps = f"{ending.steps} optimizer steps"
        ending.why = f"The program was ended{where}, after {limit_s} seconds and {steps}"
        raise ProgramEnded

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(limit_s)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _place(traceback: Any) -> str:
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return f"{Path(traceback.tb_frame.f_code.co_filename).name}:{traceback.tb_lineno}" if traceback else "?"


def _nothing(*_: object) -> None:
    """Do nothing before an optimizer's step."""
