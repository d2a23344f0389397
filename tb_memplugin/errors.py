"""The base class of all errors of this package: what is wrong, where, and how to fix it."""

from __future__ import annotations

import dis
import errno
import inspect
from itertools import chain, pairwise
from traceback import walk_tb
from types import FrameType

NO_SPACE = (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC))
"""What file systems answer where there is no space left, or no quota."""

NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
"""What the system answers to a process that has too many files open."""

PERMIT = "Give this user permission to read it."
"""What to do about a file that cannot be read, where its error tells nothing better."""

NO_FILE = "Move it elsewhere: it is no file that can be read."
"""What to do about a folder, a pipe, a socket or a device in a file's place."""

_BROKEN = (
    *(errno.EIO, errno.EBUSY, errno.EAGAIN, errno.ETIMEDOUT, getattr(errno, "ESTALE", errno.EIO)),
    *(errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTUNREACH, errno.ENETUNREACH),
)
_PATH = (errno.ENOENT, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR)
_FIXES = {
    **dict.fromkeys(NO_SPACE, "Free some disk space, or choose a folder on another disk."),
    **dict.fromkeys(NO_DESCRIPTORS, "Close files in this process, or let it open more: ulimit -n."),
    **dict.fromkeys(_BROKEN, "See whether the disk, the network file system or the object store works."),
    **dict.fromkeys(_PATH, "Check the path, and the links in it."),
    errno.EPIPE: "See whether what reads the output still runs.",
    errno.EROFS: "Choose a folder that is not read-only.",
}

_RAISES = {dis.opmap["RAISE_VARARGS"], dis.opmap["RERAISE"]}


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


class NoFileError(OSError):
    """There is a folder, a pipe, a socket, a device, or a link to nothing where a file should be."""


def cannot_read(what: str, error: OSError, where: str) -> UnreadableFileError:
    """Return the error of a file or folder, such as "The event file", that cannot be read."""
    message = f"{what} cannot be read: {error.strerror or error}."
    return UnreadableFileError(message, where=where, fix=fix_of(error, PERMIT))


def fix_of(error: OSError, otherwise: str) -> str:
    """Return what the user can do about an error of a file system: by its errno, where that tells it."""
    if isinstance(error, (IsADirectoryError, NoFileError)):
        return NO_FILE
    return _FIXES.get(error.errno or 0, otherwise)


def is_of_signal(error: BaseException) -> bool:
    """Whether a signal handler of the program, or another of its threads, raised an error amid our code."""
    steps = list(walk_tb(error.__traceback__))
    return any(_interrupts(frame, called) for (frame, _), (called, _) in pairwise(steps)) or _is_thrown(error)


def _interrupts(frame: FrameType, called: FrameType) -> bool:
    """Whether a handler of the program was called with the frame that it interrupts.

    The frame comes after a signal's number, or after the object whose method a tracer is. It also reaches an
    audit hook, after the event's name; and a function that looks for its caller keeps it in a variable.
    """
    if str(called.f_globals.get("__name__")).partition(".")[0] == __package__:
        return False
    code, variables = called.f_code, called.f_locals
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    values = [variables.get(name) for name in code.co_varnames[:count]]
    flat = chain.from_iterable(value if type(value) is tuple else (value,) for value in values)
    return any(value is frame and not isinstance(before, str) for before, value in pairwise(flat))


def _is_thrown(error: BaseException) -> bool:
    """Whether another thread has thrown an error (`PyThreadState_SetAsyncExc`): no instruction raised it."""
    last, kind = error.__traceback__, type(error)
    if last is None or error.args or (kind.__module__ == Exception.__module__ and kind is not Exception):
        return False
    while last.tb_next is not None:
        last = last.tb_next
    return last.tb_frame.f_code.co_code[last.tb_lasti] not in _RAISES
