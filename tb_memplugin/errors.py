"""The base class of all errors of this package: what is wrong, where, and how to fix it."""

from __future__ import annotations

import errno
import io
import signal
from traceback import walk_tb

NO_SPACE = (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC))
"""What file systems answer where there is no space left, or no quota."""

NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
"""What the system answers to a process that has too many files open."""

PERMIT = "Give this user permission to read it."
"""What to do about a file that cannot be read, where its error tells nothing better."""

_BROKEN = (
    *(errno.EIO, errno.EBUSY, errno.EAGAIN, errno.ETIMEDOUT, getattr(errno, "ESTALE", errno.EIO)),
    *(errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTUNREACH, errno.ENETUNREACH),
)
_FIXES = {
    **dict.fromkeys(NO_SPACE, "Free some disk space, or choose a folder on another disk."),
    **dict.fromkeys(NO_DESCRIPTORS, "Close files in this process, or let it open more: ulimit -n."),
    **dict.fromkeys(_BROKEN, "See whether the disk, the network file system or the object store works."),
    **dict.fromkeys((errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR), "Check the path, and the links in it."),
    errno.EPIPE: "See whether what reads the output still runs.",
    errno.EROFS: "Choose a folder that is not read-only.",
}


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


class UnflushedError(MemPluginError):
    """What was written could not be flushed to the disk."""


class UndeletedError(MemPluginError):
    """A temporary file could not be deleted."""


class UnreadableFileError(MemPluginError):
    """A file is truncated, damaged, of an unknown format, or of a newer version."""


class NotRecordedError(MemPluginError):
    """The requested run, worker, step or device was not recorded."""


def cannot_read(what: str, error: OSError, where: str) -> UnreadableFileError:
    """Return the error of a file or folder, such as "The event file", that cannot be read."""
    message = f"{what} cannot be read: {error.strerror or error}."
    return UnreadableFileError(message, where=where, fix=fix_of(error, PERMIT))


def fix_of(error: OSError, otherwise: str) -> str:
    """Return what the user can do about an error of a file system: by its errno, where that tells it."""
    if isinstance(error, (IsADirectoryError, io.UnsupportedOperation)):  # a folder, or a pipe
        return "Move it elsewhere: it is no file that can be read."
    return _FIXES.get(error.errno or 0, otherwise)


def is_of_signal(error: BaseException) -> bool:
    """Whether a signal handler that the program has set raised an error, in the midst of our code."""
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = {getattr(handler, "__code__", None) for handler in handlers} - {None}
    return any(frame.f_code in codes for frame, _ in walk_tb(error.__traceback__))
