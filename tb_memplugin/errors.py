"""The base class of all errors of this package: what is wrong, where, and how to fix it."""

from __future__ import annotations


class MemPluginError(Exception):
    """Base class of the errors that tb_memplugin raises. The message has up to three parts.

    Args:
        what: what is wrong, as a sentence.
        where: the file, run, argument or name that the error concerns.
        fix: what the user can do about it.
    """

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        self.what = what
        self.where = where
        self.fix = fix
        super().__init__(
            "\n".join(part for part in (what, where and f"  where: {where}", fix and f"  fix: {fix}") if part)
        )


class UnreadableFileError(MemPluginError):
    """A file is truncated, damaged, of an unknown format, or of a newer version."""


class NotRecordedError(MemPluginError):
    """The requested run, worker, step or device was not recorded."""
