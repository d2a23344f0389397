"""Errors as text for a terminal."""

from __future__ import annotations

from tb_memplugin.commands.tables import printable
from tb_memplugin.errors import MemPluginError


def refusal(error: MemPluginError, level: str = "error") -> str:
    """Format an error, or a warning, in up to three lines: what, where, fix."""
    lines = [
        f"{level}: {error.what}",
        error.where and f"  where: {error.where}",
        error.fix and f"  fix: {error.fix}",
    ]
    return "\n".join(printable(line) for line in lines if line)
