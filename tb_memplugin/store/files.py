"""File operations on local paths and, through fsspec, on URLs such as `s3://` and `gs://`.

Where the file system fails, they raise OSError, unless they say otherwise.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import io
import os
import posixpath
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from tb_memplugin import budget
from tb_memplugin.errors import MemPluginError, NoFileError
from tb_memplugin.temporary import DescriptorStream, delete, flush, new_name

ReadRange = Callable[[int, int], bytes]
Result = TypeVar("Result")

BINARY = getattr(os, "O_BINARY", 0)
"""A flag for `os.open` that Windows needs."""

WEB = ("http://", "https://")
VERSION_KEYS = ("ETag", "etag", "md5Hash", "mtime", "modified", "last_modified", "LastModified", "created")
"""What fsspec's clients call the version or the time of a file."""

PATTERN = re.compile(r"[*?[]")
"""What makes a path a pattern, as in a shell."""

_left: dict[str, OSError | None] = {}
"""Files of this process that nobody needs, with the error of deleting them; None before it is known."""
_MOST_RETRIED = 8

_READ = os.O_RDONLY | BINARY | getattr(os, "O_NONBLOCK", 0)
"""To open a pipe blocks without the last."""

_SPECIAL = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | BINARY
_READ_AHEAD = 4 << 20
_NO_LINKS = {
    *(errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EXDEV, errno.EMLINK),
    errno.EACCES,  # SELinux, AppArmor: where a file could be created, but may not be linked
    errno.EINVAL,  # FAT on Windows
}
"""What file systems answer that have no hard links, or may give none to this process."""


def is_remote(path: str) -> bool:
    """Whether a path is a URL that needs fsspec."""
    return "://" in path


def absolute(path: str) -> str:
    """Return a path that does not depend on the working folder; `~` is the home, as in TensorBoard."""
    if is_remote(path):
        return path
    with contextlib.suppress(OSError):  # the working folder is gone
        return str(Path(os.path.expanduser(path)).absolute())
    return path


def join(path: str, *parts: str) -> str:
    """Join path components with the separator of the path's file system."""
    return posixpath.join(path, *parts) if is_remote(path) else str(Path(path, *parts))


def write_new(path: str, write: Callable[[BinaryIO], Result], *, flushed: bool = False) -> Result:
    """Create a file that readers see whole or not at all, and that replaces no other.

    A local file is written under a temporary name; then a hard link gives it its own name. Unlike a rename,
    a link never replaces a file.

    Args:
        path: the file; its folder must exist.
        write: a function that writes the content to the stream it receives.
        flushed: wait until the disk has the content and then the name, so that this holds after a crash of
            the machine, too.

    Returns:
        The result of `write`.

    Raises:
        FileExistsError: a file of this name exists; it is unchanged.
        OSError: the file system failed. There is no file of this name, or, if the file system does not even
            tell that, the whole new one.
    """
    if is_remote(path):
        content = io.BytesIO()
        result = write(content)
        if exists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        with _remote(path) as (file_system, inner):
            file_system.pipe_file(inner, content.getvalue())
        return result
    for left in tuple(_left)[:_MOST_RETRIED]:
        discard(left)
    temporary = os.path.join(os.path.dirname(path), new_name())
    try:
        descriptor = os.open(temporary, _NEW, 0o666)
        with io.BufferedWriter(DescriptorStream(descriptor)) as stream:
            result = write(stream)
            if flushed:
                stream.flush()
                flush(descriptor)
        _link(temporary, path)
    finally:
        discard(temporary)
    if flushed:
        flush_path(os.path.dirname(path))
    return result


def flush_path(path: str) -> None:
    """Wait until the disk has the content of a local file, or the names in a local folder.

    Does nothing where the path was deleted, is a pipe or a device, and where the file system cannot do that.

    Raises:
        OSError: the disk failed.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | BINARY if os.name == "nt" else _READ)
    except (FileNotFoundError, NotADirectoryError, PermissionError):  # Windows opens no folders
        return
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
            flush(descriptor)
    finally:
        os.close(descriptor)


def folders_above(path: str) -> list[str]:
    """Return the folders that contain a local path, the innermost first."""
    return list(map(str, Path(path).parents))


def discard(path: str) -> None:
    """Delete a file that nobody needs; after a failure once more, and then before the next is written."""
    if is_remote(path):
        with contextlib.suppress(OSError):
            remove(path)
        return
    _left.setdefault(path, None)  # so that an interrupt leaves it noted
    error = delete(path)
    if error is None:
        _left.pop(path, None)
    else:
        _left[path] = error


def left_below(folder: str) -> list[OSError]:
    """Return the errors of the files below a local folder that could not be deleted, the last one alone."""
    below = os.path.join(folder, "")
    return [error for path, error in tuple(_left.items()) if error and path.startswith(below)][-1:]


def _link(temporary: str, path: str) -> None:
    """Give a temporary file its own name as well.

    Raises:
        FileExistsError: a file of this name exists.
        OSError: the file system failed.
    """
    try:
        os.link(temporary, path)
    except OSError as error:
        if _are_same(temporary, path):
            return  # the link was made, but the answer of the network file system was lost
        if error.errno not in _NO_LINKS:
            raise
        _reserve_and_replace(temporary, path)


def _reserve_and_replace(temporary: str, path: str) -> None:
    """Do what a link does where there are none: create an empty file unless one exists, then replace that."""
    descriptor = os.open(path, _NEW, 0o666)
    with contextlib.suppress(OSError):
        os.close(descriptor)
    try:
        os.replace(temporary, path)
    except OSError:
        if not exists(temporary):
            return  # it was done, but the answer was lost
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise


def _are_same(temporary: str, path: str) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samestat(os.lstat(temporary), os.lstat(path))
    return False


@contextlib.contextmanager
def open_ranges(path: str) -> Iterator[tuple[ReadRange, int]]:
    """Open a file; yield a function that reads byte ranges of it, up to its size now, and that size in bytes.

    Raises:
        OSError: the file system failed: FileNotFoundError if the file does not exist, NoFileError for a pipe,
            which might block forever, a socket, a device, or a link to nothing.
    """
    with contextlib.ExitStack() as stack:
        stream: Any
        if is_remote(path):
            file_system, inner = stack.enter_context(_remote(path))
            opened = file_system.open(inner, "rb", block_size=_READ_AHEAD, cache_type="readahead")
            stream = stack.enter_context(opened)
        else:
            _file_size(path)
            stream = stack.enter_context(Path(path).open("rb"))
        size = stream.seek(0, os.SEEK_END)
        budget.open_file(path, size)

        def read(offset: int, count: int) -> bytes:
            stream.seek(offset)
            return bytes(stream.read(max(0, min(count, size - offset))))  # /proc/kmsg, of size 0, blocks

        yield read, size


def make_folder(path: str) -> None:
    """Create a folder and its parents if they do not exist."""
    if is_remote(path):
        with _remote(path) as (file_system, inner):
            file_system.makedirs(inner, exist_ok=True)
    else:
        Path(path).mkdir(parents=True, exist_ok=True)


def claim(path: str, content: bytes, *, flushed: bool = False) -> bool:
    """Create a file unless one exists. Return whether the file has this content.

    On local disks, exactly one of several processes that try at the same time succeeds, if their contents
    differ. To try again after an error is safe: an earlier call may have created the file unnoticed.

    Raises:
        OSError: the file system failed. An existing file is not an error.
    """
    try:
        write_new(path, lambda stream: stream.write(content), flushed=flushed)
    except FileExistsError:
        with contextlib.suppress(NoFileError):
            return read_begin(path, len(content) + 1) == content
        return False
    return True


def remove(path: str) -> None:
    """Delete a file; a file that does not exist is not an error."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if is_remote(path):
            with _remote(path) as (file_system, inner):
                file_system.rm_file(inner)
        else:
            os.unlink(path)


def remove_empty_folder(path: str) -> None:
    """Delete a folder if it is empty; ignore failures."""
    with contextlib.suppress(OSError):
        if is_remote(path):
            with _remote(path) as (file_system, inner):
                file_system.rmdir(inner)
        else:
            os.rmdir(path)


def _file_size(path: str) -> int:
    """Return the size of a local file, without opening it, which of a pipe blocks and may change a device.

    Raises:
        NoFileError: it is a folder, a pipe, a socket, a device, or a link to nothing.
        OSError: the file system failed: FileNotFoundError if there is nothing.
    """
    try:
        status = os.stat(path)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP) and os.path.islink(path):
            raise NoFileError(error.errno, "it is a link that leads to no file", path) from error
        raise
    if not stat.S_ISREG(status.st_mode):
        kind = _SPECIAL.get(stat.S_IFMT(status.st_mode), "a device")
        raise NoFileError(errno.EINVAL, f"it is {kind}, not a file", path)
    return status.st_size


def read_begin(path: str, most: int = 1 << 16) -> bytes:
    """Return the first bytes of a file, `most` at the most.

    Raises:
        OSError: the file system failed: FileNotFoundError if the file does not exist, NoFileError for a
            folder, a pipe, a socket, a device, or a link to nothing.
    """
    if is_remote(path):
        with _remote(path) as (file_system, inner):
            return bytes(file_system.cat_file(inner)[:most])
    most = min(most, _file_size(path))
    descriptor = os.open(path, _READ)
    try:
        return read_from(descriptor, 0, most)
    except OSError as error:
        error.filename = path
        raise
    finally:
        os.close(descriptor)


def read_from(descriptor: int, offset: int, count: int) -> bytes:
    """Return `count` bytes of an open file from an offset on, fewer if the file ends before."""
    os.lseek(descriptor, offset, os.SEEK_SET)
    parts = bytearray()
    while len(parts) < count and (part := os.read(descriptor, count - len(parts))):
        parts += part
    return bytes(parts)


def names_in(path: str) -> list[str]:
    """Return the sorted names of the files directly in a folder; empty if it does not exist."""
    return _entries(path)[1]


def folders_in(path: str) -> list[str]:
    """Return the sorted names of the folders directly in a folder; empty if it does not exist."""
    return _entries(path)[0]


def _entries(path: str) -> tuple[list[str], list[str]]:
    """Return the sorted names of the folders and of the other entries directly in a folder."""
    folders: list[str] = []
    names: list[str] = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        if is_remote(path):
            with _remote(path) as (file_system, inner):
                entries = file_system.ls(inner, detail=True)
            for entry in entries:
                if entry["name"].strip("/") == inner.strip("/"):
                    continue  # some stores list the folder itself
                name = posixpath.basename(entry["name"].rstrip("/"))
                (folders if entry["type"] == "directory" else names).append(name)
        else:
            with os.scandir(path) as scan:
                for entry in scan:
                    (folders if entry.is_dir(follow_symlinks=False) else names).append(entry.name)
    return sorted(folders), sorted(names)


def is_folder(path: str) -> bool:
    """Whether a path is a folder; False if that is not known of a local path: opening it tells why.

    On the web, only an address that ends in `/` can be one: to find out, the client would read all of it.

    Raises:
        OSError: a remote file system failed. Some of them report that as an absent file when it is opened.
    """
    if path.startswith(WEB) and not path.endswith("/"):
        return False
    if is_remote(path):
        with _remote(path) as (file_system, inner):
            return bool(file_system.isdir(inner))
    return os.path.isdir(path)


def matching(path: str) -> list[str]:
    """Return the URLs that a pattern in a URL matches, sorted; if there are none, the URL, as a shell does.

    Local paths are returned as they are, because shells have expanded their patterns, and so are addresses on
    the web, in which `?` begins a query.
    """
    if not is_remote(path) or path.startswith(WEB) or not PATTERN.search(path):
        return [path]
    return list(states(path)) or [path]


def only_match(path: str) -> str:
    """Return the URL that a pattern in a URL matches; other paths and URLs as they are, see `matching`.

    Raises:
        MemPluginError: it matches several.
        OSError: the file system failed.
    """
    matches = matching(path)
    if len(matches) > 1:
        raise MemPluginError(
            f"{len(matches):,} files match this pattern; only one can be read here.",
            where=path,
            fix=f"Give one of them: {', '.join(matches[:5])}{', …' if matches[5:] else ''}",
        )
    return matches[0]


def states(path: str) -> dict[str, str]:
    """Return the files that a path or a pattern stands for, sorted, each with a text that changes as it does.

    The text is a hash of the size and of the time or the version that the file system names; "" where it
    names none, as on the web, or has no such file. A local path that exists is no pattern.

    Raises:
        OSError: a remote file system failed.
    """
    if path.startswith(WEB):
        return {path: ""}
    if not is_remote(path):
        is_pattern = PATTERN.search(path) and not os.path.lexists(path)
        names = sorted(glob.glob(path, recursive=True)) if is_pattern else [path]
        return {name: _local_state(name) for name in names}
    with _remote(path) as (file_system, inner):
        if PATTERN.search(path):
            entries = file_system.glob(inner, detail=True)
            return {
                file_system.unstrip_protocol(name): _remote_state(entries[name]) for name in sorted(entries)
            }
        try:
            return {path: _remote_state(file_system.info(inner))}
        except FileNotFoundError:
            return {path: ""}


def _local_state(path: str) -> str:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return ""
    return _hashed(status.st_size, status.st_mtime_ns)


def _remote_state(entry: dict[str, Any]) -> str:
    """Return the state of a file by what fsspec's clients say of it: each has names of its own."""
    versions = [str(entry[key]) for key in VERSION_KEYS if entry.get(key)]
    return _hashed(entry.get("size"), *versions) if versions else ""


def _hashed(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def exists(path: str) -> bool:
    """Whether a file or folder exists at a path.

    Raises:
        OSError: the file system failed, so that it is not known.
    """
    try:
        if is_remote(path):
            with _remote(path) as (file_system, inner):
                file_system.info(inner)  # unlike `exists`, which answers False to every error
        else:
            os.lstat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL character
        return False
    return True


def walk(path: str, failed: Callable[[OSError], object] = lambda _: None) -> Iterator[tuple[str, list[str]]]:
    """Yield each folder under a path, itself first, with the sorted names of its files.

    Args:
        path: a local path or an fsspec URL.
        failed: called with the error of each folder that cannot be listed, which names the folder.
    """
    if not is_remote(path):
        for folder, below, names in os.walk(path, onerror=failed):
            below.sort()
            yield folder, sorted(names)
        return
    waiting = [path]
    while waiting:
        folder = waiting.pop()
        try:
            below, names = _entries(folder)
        except OSError as error:
            failed(OSError(error.errno, error.strerror, folder))
            continue
        yield folder, names
        waiting += [join(folder, name) for name in reversed(below)]


@contextlib.contextmanager
def _remote(path: str) -> Iterator[tuple[Any, str]]:
    """Yield the client of a remote file system, whose errors are raised as OSError, and the path in it."""
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
    try:
        yield file_system, inner
    except FileNotFoundError as error:
        cause = error.__cause__
        if not isinstance(cause, OSError) or isinstance(cause, FileNotFoundError):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from error
        # So the client of the web calls a host that it cannot reach.
        raise OSError(errno.EHOSTUNREACH, f"{type(cause).__name__}: {cause}", path) from error
    except (NotADirectoryError, FileExistsError, MemPluginError):
        raise
    except OSError as error:
        if error.errno is not None:
            raise
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}", path) from error
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}", path) from error
