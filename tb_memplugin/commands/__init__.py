"""The command `tb-memplugin`: one file per sub-command, imported when it is called."""

from __future__ import annotations

import atexit
import gc
import importlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from tb_memplugin.errors import NO_SPACE, MemPluginError, fix_of
from tb_memplugin.read.collector import collector_at_rest

SUB_COMMANDS = {
    "run": "Run a program, record its memory, and say what filled it.",
    "summary": "What a recorded run used, in ten lines.",
    "view": "Show files in the Memory tab, in one command.",
    "import": "Put snapshots and traces into a logdir for the Memory tab.",
    "peak": "What was alive at the peak of a file or a recorded step.",
    "lines": "A source file with the bytes that its lines hold at the peak.",
    "diff": "What changed between the peaks of two recordings.",
    "ranks": "Which worker of a run peaks highest, and how far above the others.",
    "check": "Whether a program needs more memory than before, for a CI.",
    "stages": "Live bytes at the start and end of every annotation.",
    "usage": "Live bytes before and after one allocation or free.",
    "advice": "What to change to save memory, with the evidence for it.",
    "trace": "The events of the allocator as text.",
    "allocator": "Segments, pools and fragmentation, and why memory ran out.",
    "estimate": "Estimate whether a training step fits a GPU, without that GPU.",
    "profile": "An HTML page of memory over time, by annotation, category, context or rule.",
    "json": "Write everything in a recording as JSON.",
    "export": "Write a recording as a file for another program.",
    "mcp": "Answer a coding agent's questions about recordings.",
    "doctor": "Find out why the Memory tab is empty, and what to do.",
}
"""Sub-commands by name, with the line that `--help` shows. Each is `command` in the module of its name."""

FILES = {"import": "import_", "json": "json_"}
"""Modules of sub-commands whose names are a keyword or a standard module in Python."""

IN_THIS_PROCESS = frozenset(("estimate", "doctor", "run", "view", "mcp"))
"""Sub-commands that do not run in a child process: they read no file of others into memory."""


class LazyGroup(click.Group):
    """A click group that imports a sub-command only when it runs, so that `--help` is fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  # click's signature
        """Return the names, in the order in which `--help` lists them."""
        return list(SUB_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002  # click's
        """Return the sub-command with this name, None if there is none."""
        if cmd_name not in SUB_COMMANDS:
            return None
        file = FILES.get(cmd_name, cmd_name)
        with collector_at_rest():  # modules are no garbage
            command: click.Command = importlib.import_module(f"tb_memplugin.commands.{file}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the sub-command that the arguments name; suggest others if there is none."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            import difflib

            near = difflib.get_close_matches(args[0], SUB_COMMANDS)
            if not near or "Did you mean" in error.message:
                raise
            raise click.UsageError(f"{error.message} Did you mean {' or '.join(near)}?", ctx) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002  # click's
        """Write the list of sub-commands in `--help` without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(SUB_COMMANDS.items()))

    def main(self, args: Sequence[str] | None = None, *more: Any, **options: Any) -> Any:
        """Run the command line. If `args` is None, commands that read files go on in a child process."""
        _open_closed_streams()
        if args is None and sys.argv[1:2] and sys.argv[1] in SUB_COMMANDS.keys() - IN_THIS_PROCESS:
            from tb_memplugin.commands.apart import fork_guarded

            atexit.register(gc.freeze)  # else both processes search for cycles when they end
            try:
                fork_guarded()
            except MemPluginError as error:
                _refuse(error)
        try:
            return super().main(args, *more, **options)
        except OSError as error:  # except EPIPE, the reader of our output is gone: then click exits silently
            is_output = error.errno in NO_SPACE  # files have messages of their own
            if is_output:
                sys.stdout = None  # what it holds still cannot be written: Python would fail again at exit
            what = "The output cannot be written" if is_output else "A file or its host cannot be reached"
            fix = fix_of(error, "Check the paths, and that this machine can reach them.")
            _refuse_all(f"{what}: {error.strerror or error}.", fix)

    def invoke(self, ctx: click.Context) -> object:
        """Run a sub-command; print an error that it raises to stderr, and exit with code 2."""
        _write_any_text()
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # here rather than at exit, where nothing could be said
        except MemPluginError as error:
            from tb_memplugin.commands.opening import naming_files

            _refuse(naming_files(error, ctx))
        except MemoryError:
            from tb_memplugin.budget import out_of_memory
            from tb_memplugin.commands.tables import the_command

            _refuse(out_of_memory(the_command(), "The command"))
        return result


def _open_closed_streams() -> None:
    """Open what the shell has closed (`>&-`), or the first file that a command opens would get its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115


def _write_any_text() -> None:
    """Escape characters that the encoding of stdout or stderr lacks instead of raising an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _refuse_all(message: str, fix: str) -> NoReturn:
    """Exit with an error whose place is the command line, because the file at fault is not known."""
    from tb_memplugin.commands.tables import the_command

    _refuse(MemPluginError(message, where=the_command(), fix=fix))


def _refuse(error: MemPluginError) -> NoReturn:
    from tb_memplugin.commands.tables import refusal

    click.echo(refusal(error), err=True)
    raise SystemExit(2)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tb-memplugin", prog_name="tb-memplugin")
def main() -> None:
    """Where the memory of a training step goes, by layer and category."""
