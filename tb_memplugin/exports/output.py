"""Output files of exports: a temporary file that is renamed when it is complete."""

from __future__ import annotations

import errno
import io
import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, BinaryIO

from tb_memplugin.errors import MemPluginError
from tb_memplugin.temporary import DescriptorStream, delete, delete_left, flush, new_name

STDOUT = "-"
"""The path that stands for stdout, as in other programs; a file of this name is `./-`."""

FIX = "Choose another file: in an existing folder that you can write to, on a disk that has space."

_BINARY = getattr(os, "O_BINARY", 0)

_limit: ContextVar[tuple[int, str] | None] = ContextVar("limit", default=None)
"""The most bytes that a file may have, and what to do where it would have more. None: any number."""


@contextmanager
def at_most(size: int, fix: str) -> Iterator[None]:
    """Within the block, refuse files that would have more bytes: a small recording can have many times more.

    Pipes, devices and stdout take any number.

    Args:
        fix: what to do then, as the `fix` of the error that `replacing` raises.
    """
    token = _limit.set((size, fix))
    try:
        yield
    finally:
        _limit.reset(token)


class _LimitedStream(DescriptorStream):
    """Writes to a descriptor, at most as many bytes as `at_most` allows.

    Raises:
        MemPluginError: on writing, if there are more.
    """

    def __init__(self, descriptor: int, path: str | os.PathLike[str]) -> None:
        super().__init__(descriptor)
        self._path, self._size = os.fspath(path), 0

    def write(self, data: Any) -> int:
        limit = _limit.get()
        if limit is not None and self._size + len(data) > limit[0]:
            message = f"The file would have more than {limit[0]:,} bytes."
            raise MemPluginError(message, where=self._path, fix=limit[1])
        written = super().write(data)
        self._size += written
        return written


def written_by() -> str:
    """Return the name and the version of the writer, for formats that record them."""
    from importlib.metadata import version  # it imports more than a command that writes no file

    return f"tb_memplugin {version('tb-memplugin')}"


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a stream whose bytes become the file at `path` when the block ends without an error.

    After an error they are deleted. Links are followed; a pipe or device is written directly, and so is
    stdout, which is the path `-`.

    Raises:
        MemPluginError: the file cannot be written, or would be larger than `at_most` allows.
    """
    if path == STDOUT:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    try:
        target, is_special = _target(path)
        if is_special:
            with io.BufferedWriter(DescriptorStream(os.open(target, os.O_WRONLY | _BINARY))) as stream:
                yield stream
            return
        folder = os.path.dirname(target)
        delete_left(folder)
        part = os.path.join(folder, new_name())
        try:
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY, 0o666)
            with io.BufferedWriter(_LimitedStream(descriptor, path)) as stream:
                yield stream
                stream.flush()
                flush(descriptor)  # else a crash of the machine could leave an empty file in place of the old
            _replace(part, target)
        finally:
            delete(part)
    except OSError as error:
        raise cannot_write(path, error) from error


def _replace(part: str, target: str) -> None:
    try:
        os.replace(part, target)
    except OSError as error:
        try:
            os.lstat(part)
        except FileNotFoundError:
            return  # it was done, but the answer of the network file system was lost
        except OSError:
            raise error from None
        raise


def cannot_write(path: str | os.PathLike[str], error: OSError) -> MemPluginError:
    """Return the error of an output file at a path that an error of the file system caused."""
    message = f"The file cannot be written: {error.strerror or error}."
    return MemPluginError(message, where=os.fspath(path), fix=FIX)


def _target(path: str | os.PathLike[str]) -> tuple[str, bool]:
    """Return the file behind links, and whether it is a pipe or a device, which no file may replace.

    A pipe or a device is returned as it was given: a pipe cannot be opened by its real path.

    Raises:
        OSError: the file system failed, so that it is not known; or it is a folder.
    """
    try:
        mode = os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):
        target = os.path.realpath(path)
        if os.path.isdir(target):
            raise IsADirectoryError(errno.EISDIR, "it is a folder") from None
        return target, False
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder")
    if not stat.S_ISREG(mode):
        return os.fspath(path), True
    return os.path.realpath(path, strict=True), False
