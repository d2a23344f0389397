"""The type of arguments and options that are paths: `~` is the home, also where a shell leaves it alone."""

from __future__ import annotations

import os

from click.types import FuncParamType


def path(text: str) -> str:
    """Return a path or URL with the user's home in place of `~` at its beginning.

    Shells put it there only where a word begins: not in `--logdir=~/runs`, and not in quotes.
    """
    return os.path.expanduser(text)  # noqa: PTH111  # pathlib raises without a home, and breaks URLs


PATH = FuncParamType(path)
