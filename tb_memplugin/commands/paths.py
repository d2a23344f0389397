"""Arguments and options that are paths: `~` is the home, also where a shell leaves it alone."""

from __future__ import annotations

import os

import click
from click.types import FuncParamType


def path(text: str) -> str:
    """Return a path or URL with the user's home in place of `~` at its beginning.

    Shells put it there only where a word begins: not in `--logdir=~/runs`, and not in quotes.
    """
    return os.path.expanduser(text)  # noqa: PTH111  # pathlib raises without a home, and breaks URLs


PATH = FuncParamType(path)

output_option = click.option(
    "-o",
    "--output",
    type=PATH,
    required=True,
    help="The file to write, or - for stdout. An existing file is replaced.",
)
"""The option for what a command writes."""
