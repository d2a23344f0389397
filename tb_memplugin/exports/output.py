"""Output files of exports: a temporary file that is renamed when it is complete."""

from __future__ import annotations

import os
import secrets
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import BinaryIO

from tb_memplugin.errors import MemPluginError

WRITTEN_BY = f"tb_memplugin {version('tb-memplugin')}"
"""The name of the writer, for formats that record it."""

STDOUT = "-"
"""The path that stands for stdout, as in other programs; a file of this name is `./-`."""

FIX = "Choose another file with -o: in an existing folder that you can write to, on a disk that has space."


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """Open a stream whose bytes become the file at `path` when the block ends without an error.

    After an error they are deleted. Links are followed; a pipe or device is written directly, and so is
    stdout, which is the path `-`.

    Raises:
        MemPluginError: the file cannot be written.
    """
    if path == STDOUT:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    try:
        special = _is_special(path)
    except OSError as error:
        raise _cannot_write(path, error) from error
    target = Path(path if special else os.path.realpath(path))  # a pipe cannot be opened by its real path
    part = target if special else target.parent / f".tb_memplugin-{os.getpid()}-{secrets.token_hex(4)}.part"
    try:
        if target.is_dir():
            raise IsADirectoryError(21, "it is a folder")
        with part.open("wb") as stream:
            yield stream
        if not special:
            part.replace(target)
    except OSError as error:
        raise _cannot_write(path, error) from error
    finally:
        if not special:
            with suppress(OSError):
                part.unlink(missing_ok=True)


def _cannot_write(path: str | os.PathLike[str], error: OSError) -> MemPluginError:
    what = f"The file cannot be written: {error.strerror or error}."
    return MemPluginError(what, where=os.fspath(path), fix=FIX)


def _is_special(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a pipe or a device, which no file may replace.

    Raises:
        OSError: the file system failed, so that it is not known.
    """
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116  # follows links, as opening does
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)
