"""The command `tb-memplugin`: one file per sub-command, imported when it is called."""

from __future__ import annotations

import errno
import importlib
import io
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import click

from tb_memplugin.commands.apart import READ_FILES, go_apart
from tb_memplugin.errors import MemPluginError

SUB_COMMANDS = {
    "import": "Put snapshots and traces into a logdir, for the Memory tab.",
    "peak": "What was alive at the peak, of a file or of a recorded step.",
    "diff": "What was added, removed, grown and shrunk between two peaks.",
    "stages": "Live bytes at the beginning and end of every annotation.",
    "usage": "Live bytes before and after one allocation was made, or given back.",
    "advice": "What of the memory could be saved, with the evidence for it.",
    "allocator": "Segments, pools, fragmentation, and why memory ran out.",
    "estimate": "Whether a training step would fit a GPU, without one.",
    "profile": "Memory over time by annotations, categories, context or rules, as a page.",
    "json": "Everything that a recording holds, as JSON.",
    "export": "A recording as html, speedscope, perfetto, csv, json or snapshot.",
    "doctor": "Why the Memory tab might be empty, and what to do.",
}
"""Sub-commands by name, with the line that `--help` shows. Each is `command` in the file of its name."""

LONGEST_COMMAND = 200
"""Characters of a command line that a message repeats."""

FILES = {"import": "import_", "json": "json_"}
"""Files of sub-commands whose names Python uses itself."""


class LazyGroup(click.Group):
    """A group that imports a sub-command when it runs: `--help` and typing stay quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002  # click's signature
        """The names, in the order in which people need them."""
        return list(SUB_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002  # click's
        """The sub-command with this name, None if there is none."""
        if cmd_name not in SUB_COMMANDS:
            return None
        file = FILES.get(cmd_name, cmd_name)
        command: click.Command = importlib.import_module(f"tb_memplugin.commands.{file}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002  # click's
        """The list in `--help`, without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl(list(SUB_COMMANDS.items()))

    def main(self, args: Sequence[str] | None = None, *more: Any, **options: Any) -> Any:
        """Run the command line. Called without arguments it is the program, and reads files in a child."""
        if args is None and sys.argv[1:2] and sys.argv[1] in READ_FILES:
            try:
                go_apart()
            except MemPluginError as error:
                _refuse(error)
        return super().main(args, *more, **options)

    def invoke(self, ctx: click.Context) -> object:
        """Run a sub-command; what we refuse goes to stderr, with exit code 2."""
        _write_any_text()
        try:
            return super().invoke(ctx)
        except MemPluginError as error:
            from tb_memplugin.commands.opening import naming_files

            _refuse(naming_files(error, ctx))
        except MemoryError:
            _refuse_all("The command needs more memory than there is.", "Try it where there is more memory.")
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader of our output is gone: click ends quietly
                raise
            what = f"A file or its host cannot be reached: {error.strerror or error}."
            _refuse_all(what, "See to the paths, and that this machine reaches them.")


def _write_any_text() -> None:
    """What a terminal's or a pipe's encoding lacks is written as its number, and no reason to stop."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _refuse_all(what: str, fix: str) -> NoReturn:
    """Refuse for a reason that no single file of the command line is known to have."""
    _refuse(MemPluginError(what, where=" ".join(sys.argv[1:])[:LONGEST_COMMAND], fix=fix))


def _refuse(error: MemPluginError) -> NoReturn:
    from tb_memplugin.commands.refusals import refusal

    click.echo(refusal(error), err=True)
    raise SystemExit(2)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tb-memplugin", prog_name="tb-memplugin")
def main() -> None:
    """Where the memory of a training step went, by layer and category."""
