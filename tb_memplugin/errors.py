"""The one error root: a message says what was wrong, where, and what to do."""

from __future__ import annotations


class MemPluginError(Exception):
    """Anything that tb_memplugin refuses, told in three parts.

    Args:
        what: what is wrong, as a sentence.
        where: the file, run, argument or name that it concerns.
        fix: what the reader can do about it.
    """

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what = what
        self.where = where
        self.fix = fix
        super().__init__(
            "\n".join(part for part in (what, where and f"  where: {where}", fix and f"  fix: {fix}") if part)
        )


class UnreadableFileError(MemPluginError):
    """A file is truncated, foreign, or of a newer version."""


class NotRecordedError(MemPluginError):
    """A run, worker, step or device was asked for that was not recorded."""
