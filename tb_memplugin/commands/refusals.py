"""Errors as text for a terminal."""

from __future__ import annotations

import sys

from tb_memplugin.commands.tables import printable
from tb_memplugin.errors import MemPluginError


def the_command() -> str:
    """Return the command line, shortened: the place of an error that no file or option is known for."""
    return " ".join(sys.argv[1:])[:200]


def refusal(error: MemPluginError, level: str = "error") -> str:
    """Format an error, or a warning, in up to three lines: what, where, fix."""
    lines = [
        f"{level}: {error.what}",
        error.where and f"  where: {error.where}",
        error.fix and f"  fix: {error.fix}",
    ]
    return "\n".join(printable(line) for line in lines if line)
