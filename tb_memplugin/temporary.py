"""Temporary files and folders, named after their process, and streams that write with `os` alone."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
import secrets
import shutil
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

UNKNOWN_SECONDS = 7 * 24 * 3600
"""The age from which a temporary file counts as left by a process of which nothing is known."""

_NAME = re.compile(r"\.(?:([0-9a-f]{16}\.[0-9]{1,10})\.)?[0-9a-f]{16}\.tmp")
_PROCESS = re.compile(r"([0-9a-f]{16})\.([0-9]{1,10})")
_FOLDER = "tb_memplugin-"
"""What temporary folders begin with. The process follows, and then what makes their names unique."""

_BOOT, _NAMESPACE = "/proc/sys/kernel/random/boot_id", "/proc/self/ns/pid"


def new_name() -> str:
    """Return a name for a temporary file of this process.

    It has no part of the file's own name: TensorBoard takes what has "tfevents" in it for an event file.
    """
    return f".{this_process()}.{secrets.token_hex(8)}.tmp"


def this_process() -> str:
    """Return this boot and namespace of process ids, as 16 hexadecimal digits, and the process id."""
    return f"{_machine() or '0' * 16}.{os.getpid()}"


def is_here(process: str) -> bool:
    """Whether a process, by the text of `this_process`, was started on this machine since its boot."""
    match = _PROCESS.fullmatch(process)
    return match is not None and match[1] == _machine()


def has_ended(process: str) -> bool:
    """Whether a process, by the text of `this_process`, is known to have ended."""
    return is_running(process) is False


def is_running(process: str) -> bool | None:
    """Whether a process, by the text of `this_process`, is running; None if that is not known."""
    if not is_here(process):
        return None
    try:
        os.kill(int(process.partition(".")[2]), 0)
    except OSError as error:
        return error.errno != errno.ESRCH
    return True


def delete(path: str) -> OSError | None:
    """Delete a file; after a failure once more. Return the error if that failed, too, and it may be there.

    A read-only file system refuses it also where there is no file, as of one that could not be created.
    """
    failure = None
    for _ in range(2):
        try:
            with suppress(FileNotFoundError):
                os.unlink(path)
        except OSError as error:
            failure = error.with_traceback(None)
        else:
            return None
    try:
        os.lstat(path)
    except FileNotFoundError:
        return None
    except OSError:
        pass
    return failure


def delete_left(folder: str) -> None:
    """Delete the temporary files that killed writers left in a local folder. Failures are ignored."""
    with suppress(OSError):
        for name in os.listdir(folder):
            path = os.path.join(folder, name)
            if _is_left(path, name):
                delete(path)


def new_folder(inside: Path | None = None) -> tempfile.TemporaryDirectory[str]:
    """Return a temporary folder of this process. Those that killed processes left are deleted.

    Args:
        inside: the folder to make it in. None: that of the system's temporary files.

    Raises:
        OSError: there is no place for it.
    """
    inside = inside or Path(tempfile.gettempdir())
    with suppress(OSError):
        for path in inside.glob(f"{_FOLDER}*"):
            if has_ended(path.name.removeprefix(_FOLDER).partition("-")[0]):
                shutil.rmtree(path, ignore_errors=True)
    prefix = f"{_FOLDER}{this_process()}-"
    return tempfile.TemporaryDirectory(prefix=prefix, dir=inside, ignore_cleanup_errors=True)


def _is_left(path: str, name: str) -> bool:
    """Whether a file is a temporary one of ours that nobody will finish.

    Raises:
        OSError: the file system failed.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return False
    if match[1] is not None and match[1].startswith(_machine() or "?"):
        return has_ended(match[1])
    return age_seconds(path) > UNKNOWN_SECONDS


def age_seconds(path: str) -> float:
    """Return the seconds since a file or the names in a folder last changed.

    Raises:
        OSError: the file system failed.
    """
    return time.time() - Path(path).lstat().st_mtime


def _machine() -> str:
    """Return what distinguishes this boot and namespace of process ids, "" where the system does not tell."""
    return _machine_of(os.getpid())


@cache
def _machine_of(_: int) -> str:  # a fork may be in another namespace
    with suppress(OSError):
        identity = Path(_BOOT).read_bytes() + f" {Path(_NAMESPACE).readlink()}".encode()
        return hashlib.sha256(identity).hexdigest()[:16]
    return ""


_NO_FLUSH = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
"""What file systems answer that cannot flush."""


class DescriptorStream(io.RawIOBase):
    """An unbuffered stream that writes to a file descriptor, and closes it.

    Args:
        descriptor: the descriptor of a file that was opened for writing.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def writable(self) -> bool:
        """Whether the stream can be written to: yes."""
        return True

    def write(self, data: Any) -> int:
        """Write some of the data; return how many bytes."""
        return os.write(self._descriptor, data)

    def close(self) -> None:
        """Close the descriptor."""
        if not self.closed:
            super().close()
            os.close(self._descriptor)


def flush(descriptor: int) -> None:
    """Wait until the disk has the content of an open file or folder, where the file system can do that.

    Raises:
        OSError: the disk failed.
    """
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FLUSH:
            raise
