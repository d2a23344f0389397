"""Files here and elsewhere: plain ones for local paths, fsspec for `s3://`, `gs://` and the rest."""

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
    """Whether a path needs fsspec."""
    return "://" in path


def absolute(path: str) -> str:
    """A path that stays where it is when the working folder changes; `~` is home, as in TensorBoard."""
    if is_remote(path):
        return path
    with contextlib.suppress(OSError):  # the working folder is gone
        return str(Path(os.path.expanduser(path)).absolute())  # noqa: PTH111  # Path raises without a home
    return path


def join(path: str, *parts: str) -> str:
    """Path components put together, as the path's own system writes them."""
    return posixpath.join(path, *parts) if is_remote(path) else str(Path(path, *parts))


def write_whole(path: str, write: Callable[[BinaryIO], Result]) -> Result:
    """Create a file that readers see whole or not at all.

    Args:
        path: the file; its folder exists.
        write: writes the content to the stream that it is given.

    Raises:
        OSError: what the file system says. Nothing is left behind.
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
    """Add to the end of a local file, wholly or not at all.

    Raises:
        OSError: what the file system says. The file is as it was.
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
    """A file to read by byte range, and its size.

    Raises:
        OSError: what the file system says; FileNotFoundError for an absent file, UnsupportedOperation for a
            pipe, which might never open.
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
    """Create a folder and those above it, where absent.

    Raises:
        OSError: what the file system says.
    """
    if is_remote(path):
        file_system, inner = _remote(path)
        file_system.makedirs(inner, exist_ok=True)
    else:
        Path(path).mkdir(parents=True, exist_ok=True)


def claim(path: str, content: bytes) -> bool:
    """Create a file unless it exists: of several processes that try, one succeeds (on local disks).

    Raises:
        OSError: what the file system says, but for an existing file.
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
    except OSError:  # a full disk: whoever tries again finds it free
        remove(path)
        raise
    return True


def remove(path: str) -> None:
    """Delete a file if it can be done."""
    with contextlib.suppress(OSError):
        if is_remote(path):
            file_system, inner = _remote(path)
            file_system.rm_file(inner)
        else:
            Path(path).unlink(missing_ok=True)


def remove_empty_folder(path: str) -> None:
    """Delete a folder if nothing is in it and it can be done."""
    with contextlib.suppress(OSError):
        if is_remote(path):
            file_system, inner = _remote(path)
            file_system.rmdir(inner)
        else:
            Path(path).rmdir()


def read_small(path: str, most: int = 1 << 16) -> bytes:
    """The first bytes of a file, empty where it cannot be read."""
    try:
        with open_ranges(path) as (read, _):
            return read(0, most)
    except OSError:
        return b""


def is_folder(path: str) -> bool:
    """Whether a path is a folder's."""
    if is_remote(path):
        file_system, inner = _remote(path)
        return bool(file_system.isdir(inner))
    return os.path.isdir(path)  # noqa: PTH112  # where it may not be looked at, Path raises


def folders_in(path: str) -> list[str]:
    """The names of the folders that lie right in a folder, sorted; none where it is absent."""
    if is_remote(path):
        file_system, inner = _remote(path)
        with contextlib.suppress(OSError):
            return sorted(
                posixpath.basename(item["name"].rstrip("/"))
                for item in file_system.ls(inner, detail=True)
                if item["type"] == "directory"
            )
        return []
    with contextlib.suppress(OSError):
        return sorted(entry.name for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False))
    return []


def exists(path: str) -> bool:
    """Whether there is something at a path."""
    if is_remote(path):
        file_system, inner = _remote(path)
        return bool(file_system.exists(inner))
    return os.path.lexists(path)


def walk(path: str) -> Iterator[tuple[str, list[str]]]:
    """Every folder under a path, itself first, in order of names, with the names of its files."""
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
