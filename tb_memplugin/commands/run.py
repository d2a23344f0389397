"""`tb-memplugin run`: run a program and record its memory, without a change to it."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import click

from tb_memplugin.commands.options import PATH
from tb_memplugin.errors import MemPluginError
from tb_memplugin.launch import start
from tb_memplugin.main_module import CODE

START_FILE = "tb_memplugin.pth"
"""What pip installs beside the package: Python runs it whenever it starts."""


@click.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option(
    "--logdir", type=PATH, default="runs", show_default=True, help="Folder for TensorBoard, or a URL."
)
@click.option(
    "--steps",
    default="",
    help="Steps to record in full: 10, or 3:6 (3, 4 and 5), or 3:6,100. A step ends with the optimizer's; "
    "without one, it is a call of the model. Default: 2:5; without an optimizer 0:2.",
)
@click.option("--snapshot", is_flag=True, help="Record the GPU allocator's history in these steps, too.")
@click.option(
    "--stacks/--no-stacks", default=True, show_default=True, help="Record Python stacks in these steps."
)
@click.option("--shapes", is_flag=True, help="Record dtypes and shapes of tensors in these steps.")
@click.option(
    "--every-step/--no-every-step", default=True, show_default=True, help="Keep figures of every step."
)
@click.option(
    "--log-to",
    multiple=True,
    type=click.Choice(["wandb", "mlflow", "trackio"]),
    help="A tracker that the program uses: it gets peaks and reports, too. May be given several times.",
)
@click.option("-m", "module", is_flag=True, help="PROGRAM is a module, as in python -m.")
@click.argument("program")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(
    logdir: str,
    steps: str,
    snapshot: bool,
    stacks: bool,
    shapes: bool,
    every_step: bool,
    log_to: tuple[str, ...],
    module: bool,
    program: str,
    arguments: tuple[str, ...],
) -> None:
    """Run PROGRAM, record its memory, and say at its end what filled it.

    PROGRAM is a Python script, - (standard input), -c CODE, a module (with -m), or a command such as
    torchrun; child processes are recorded, too. kill -USR1 records the next two steps of a running process.
    Without this command:
    TB_MEMPLUGIN=runs python train.py
    """
    start.read_steps(steps, "--steps")
    if "://" not in logdir:
        logdir = _writable(Path(logdir).absolute())
    environment = {
        **os.environ,
        start.LOGDIR: logdir,
        start.RUN: start.run_name(_named_after(program, arguments, module=module), os.environ),
        start.OWNER: str(os.getpid()),
        start.STEPS: steps,
        start.SNAPSHOT: str(int(snapshot)),
        start.STACKS: str(int(stacks)),
        start.SHAPES: str(int(shapes)),
        start.EVERY_STEP: str(int(every_step)),
        start.LOG_TO: ",".join(log_to),
    }
    if module:
        words = [*_python(), "-m", program, *arguments]
    elif program in CODE or _is_python(Path(program)):
        words = [*_python(), program, *arguments]
    elif executable := shutil.which(program) or shutil.which(program, path=sysconfig.get_path("scripts")):
        words = [executable, *arguments]
    else:
        raise MemPluginError(
            "There is no such script, and no such command on PATH or installed for this Python.",
            where=program,
            fix="Give a script, a command's path, - for standard input, -c CODE, or -m MODULE.",
        )
    if os.name == "nt":  # where exec would end this process before the program
        raise SystemExit(subprocess.run(words, env=environment, check=False).returncode)
    os.execve(words[0], words, environment)


def _writable(folder: Path) -> str:
    """Return a folder in which files can be written, or that can be created.

    Raises:
        MemPluginError: it is neither, and a program that runs for days would be recorded for nothing.
    """
    existing = next(each for each in (folder, *folder.parents) if os.path.lexists(each))
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        why = "No files can be written there." if existing.is_dir() else "This is no folder."
        raise MemPluginError(why, where=f"--logdir {existing}", fix="Choose a folder that you can write to.")
    return str(folder)


def _named_after(program: str, arguments: Sequence[str], *, module: bool) -> str:
    """Return the path that a run is named after: of a command, the first Python file that it is given.

    A command may be a Python script without a suffix, as `torchrun` is.
    """
    if module:
        return f"{program}.py"
    if program in CODE or (Path(program).suffix and _is_python(Path(program))):
        return program
    return next((each for each in arguments if each.endswith(".py")), program)


def _is_python(program: Path) -> bool:
    """Return whether Python runs this path: a script, a zip archive, or a folder with a `__main__.py`."""
    if not program.is_file():
        return (program / "__main__.py").is_file()
    if program.suffix in (".py", ".pyw", ".pyz") or not os.access(program, os.X_OK):
        return True
    with program.open("rb") as file:
        first = file.readline(256)
    return first.startswith(b"#!") and b"python" in first


def _python() -> list[str]:
    """Return how this Python runs a program that is recorded, with its own options (-O, -u, -W, -X).

    Its start file begins to record. Where that was not installed, another main module does, and the program's
    tracebacks show that.
    """
    as_module = enumerate(pairwise(sys.orig_argv))
    end = next((index for index, pair in as_module if pair == ("-m", "tb_memplugin")), 1)
    folders = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    launcher = (
        [] if any(Path(each, START_FILE).is_file() for each in folders) else ["-m", "tb_memplugin.launch"]
    )
    return [sys.executable, *sys.orig_argv[1:end], *launcher]
