"""Options that several commands have, and paths in arguments and options."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import click
from click.types import FuncParamType

from tb_memplugin.errors import MemPluginError
from tb_memplugin.store import files

Command = TypeVar("Command", bound=Callable[..., object])


def path(text: str) -> str:
    """Return a path or URL with the user's home in place of `~` at its beginning.

    Shells put it there only where a word begins: not in `--logdir=~/runs`, and not in quotes.

    Raises:
        MemPluginError: the text is empty, as of a variable that is not set.
    """
    if not text:
        raise MemPluginError("The path is empty.", where="''", fix="Give a path; . is this folder.")
    return os.path.expanduser(text)  # noqa: PTH111  # pathlib raises without a home, and breaks URLs


def source(text: str) -> str:
    """Return the path or URL of a recording; of a pattern in a URL, the one that it matches.

    Raises:
        MemPluginError: it matches several.
    """
    return files.only_match(path(text))


PATH = FuncParamType(path)
SOURCE = FuncParamType(source)

MOST_OUTPUT_BYTES = 4_000_000_000
"""The largest file that a command writes: a recording of some kilobytes can name far more than a disk has."""


def _limited(context: click.Context, _: click.Parameter, output: str) -> str:
    """Limit the files that the command writes."""
    from tb_memplugin.exports.output import at_most  # only for commands that write files

    fix = "Write it to stdout, which takes any size: -o - | gzip > FILE. csv is smaller with --no-stacks."
    context.with_resource(at_most(MOST_OUTPUT_BYTES, fix))
    return output


output_option = click.option(
    "-o",
    "--output",
    type=PATH,
    callback=_limited,
    required=True,
    help="The file to write, or - for stdout. An existing file is replaced.",
)
"""The option for what a command writes."""


def json_option(text: str) -> Callable[[Command], Command]:
    """Return the option `--json`, which a command receives as `as_json`; `text` says what JSON has."""
    return click.option("--json", "as_json", is_flag=True, help=text)
