"""File operations on local paths and, through fsspec, on URLs such as `s3://` and `gs://`."""

from __future__ import annotations

import contextlib
import io
import os
import posixpath
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from tb_memplugin.errors import MemPluginError

ReadRange = Callable[[int, int], bytes]
Result = TypeVar("Result")

_READ_AHEAD = 4 << 20


def is_remote(path: str) -> bool:
    """Whether a path is a URL that needs fsspec."""
    return "://" in path


def absolute(path: str) -> str:
    """Return a path that does not depend on the working folder; `~` is the home, as in TensorBoard."""
    if is_remote(path):
        return path
    with contextlib.suppress(OSError):  # the working folder is gone
        return str(Path(os.path.expanduser(path)).absolute())  # noqa: PTH111  # Path raises without a home
    return path


def join(path: str, *parts: str) -> str:
    """Join path components with the separator of the path's file system."""
    return posixpath.join(path, *parts) if is_remote(path) else str(Path(path, *parts))


def write_whole(path: str, write: Callable[[BinaryIO], Result]) -> Result:
    """Create a file that readers see whole or not at all. Return the result of `write`.

    Args:
        path: the file; its folder must exist.
        write: a function that writes the content to the stream it receives.

    Raises:
        OSError: the file system failed. No file is left behind.
    """
    if is_remote(path):
        content = io.BytesIO()
        result = write(content)
        file_system, inner = _remote(path)
        file_system.pipe_file(inner, content.getvalue())
        return result
    target = Path(path)
    # Without the file's own name: TensorBoard takes whatever has "tfevents" in its name for an event file.
    temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("wb") as stream:
            result = write(stream)
        temporary.replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    return result


def append(path: str, data: bytes) -> None:
    """Append to a local file, completely or not at all.

    Raises:
        OSError: the file system failed. The file is unchanged.
    """
    existed = Path(path).exists()
    with open(path, "ab", buffering=0) as stream:  # noqa: PTH123  # unbuffered: a failed write shows here
        before = stream.seek(0, os.SEEK_END)
        try:
            view = memoryview(data)
            while view:
                view = view[stream.write(view) :]
        except BaseException:
            with contextlib.suppress(OSError):
                os.ftruncate(stream.fileno(), before)
            if not existed:
                remove(path)
            raise


@contextlib.contextmanager
def open_ranges(path: str) -> Iterator[tuple[ReadRange, int]]:
    """Open a file; yield a function that reads byte ranges, and the file's size in bytes.

    Raises:
        OSError: the file system failed: FileNotFoundError if the file does not exist, UnsupportedOperation
            for a pipe, which might block forever.
    """
    with contextlib.ExitStack() as stack:
        stream: Any
        if is_remote(path):
            file_system, inner = _remote(path)
            opened = file_system.open(inner, "rb", block_size=_READ_AHEAD, cache_type="readahead")
            stream = stack.enter_context(opened)
        else:
            if Path(path).is_fifo():
                raise io.UnsupportedOperation("it is a pipe")
            stream = stack.enter_context(Path(path).open("rb"))
        size = stream.seek(0, os.SEEK_END)

        def read(offset: int, count: int) -> bytes:
            stream.seek(offset)
            return bytes(stream.read(count))

        yield read, size


def make_folder(path: str) -> None:
    """Create a folder and its parents if they do not exist.

    Raises:
        OSError: the file system failed.
    """
    if is_remote(path):
        file_system, inner = _remote(path)
        file_system.makedirs(inner, exist_ok=True)
    else:
        Path(path).mkdir(parents=True, exist_ok=True)


def claim(path: str, content: bytes) -> bool:
    """Create a file unless it exists. Return whether this call created it.

    On local disks, exactly one of several processes that try at the same time succeeds.

    Raises:
        OSError: the file system failed. An existing file is not an error.
    """
    if is_remote(path):
        file_system, inner = _remote(path)
        if file_system.exists(inner):
            return False
        file_system.pipe_file(inner, content)
        return True
    try:
        Path(path).touch(exist_ok=False)
    except FileExistsError:
        return False
    try:
        Path(path).write_bytes(content)
    except OSError:  # a full disk: remove the claim, so that a later attempt can succeed
        remove(path)
        raise
    return True


def remove(path: str) -> None:
    """Delete a file; ignore failures."""
    with contextlib.suppress(OSError):
        if is_remote(path):
            file_system, inner = _remote(path)
            file_system.rm_file(inner)
        else:
            Path(path).unlink(missing_ok=True)


def remove_empty_folder(path: str) -> None:
    """Delete a folder if it is empty; ignore failures."""
    with contextlib.suppress(OSError):
        if is_remote(path):
            file_system, inner = _remote(path)
            file_system.rmdir(inner)
        else:
            Path(path).rmdir()


def read_small(path: str) -> bytes:
    """Return the first 64 KiB of a file; empty if the file cannot be read."""
    try:
        with open_ranges(path) as (read, _):
            return read(0, 1 << 16)
    except OSError:
        return b""


def names_in(path: str) -> list[str]:
    """Return the sorted names of the files directly in a folder; empty if it does not exist."""
    return next((names for _, names in walk(path)), [])


def is_folder(path: str) -> bool:
    """Whether a path is a folder."""
    if is_remote(path):
        file_system, inner = _remote(path)
        return bool(file_system.isdir(inner))
    return os.path.isdir(path)  # noqa: PTH112  # Path raises where permission is denied


def folders_in(path: str) -> list[str]:
    """Return the sorted names of the folders directly in a folder; empty if it does not exist."""
    if is_remote(path):
        file_system, inner = _remote(path)
        with contextlib.suppress(OSError):
            return sorted(
                posixpath.basename(entry["name"].rstrip("/"))
                for entry in file_system.ls(inner, detail=True)
                if entry["type"] == "directory"
            )
        return []
    with contextlib.suppress(OSError):
        return sorted(entry.name for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False))
    return []


def exists(path: str) -> bool:
    """Whether a file or folder exists at a path."""
    if is_remote(path):
        file_system, inner = _remote(path)
        return bool(file_system.exists(inner))
    return os.path.lexists(path)


def walk(path: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each folder under a path, itself first, with the sorted names of its files."""
    if not is_remote(path):
        for folder, below, names in os.walk(path):
            below.sort()
            yield folder, sorted(names)
        return
    file_system, inner = _remote(path)
    for folder, _, names in file_system.walk(inner):
        yield file_system.unstrip_protocol(folder), sorted(names)


def _remote(path: str) -> tuple[Any, str]:
    try:
        from fsspec.core import url_to_fs  # heavy, and most logdirs are local

        file_system, inner = url_to_fs(path)
    except (ImportError, ValueError) as error:
        raise MemPluginError(
            f"This path needs a file system that is not installed: {error}",
            where=path,
            fix="Install its fsspec client.",
        ) from error
    file_system.invalidate_cache()
    return file_system, inner
