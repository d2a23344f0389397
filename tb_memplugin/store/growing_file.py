"""Files that grow by one group of records at a time, and what is known of them after an operation failed.

The rule for every file of a writer: a byte that may be in a file is never overwritten with another, and
nothing that exists is ever replaced. So an append that fails ends in one of two states:

- `OSError`: nothing of it is in the file, and nothing ever will be. The caller may write it again.
- `UnsettledError`: that is not known, because the file system fails at that too. The bytes are kept, and the
  next call finds out what the file contains and completes it: the same bytes at the same offset.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable

from tb_memplugin.store import files

_NO_FILE = (errno.EISDIR, errno.ENXIO, errno.ELOOP)
"""What the system answers where a folder, a socket or a link to itself is opened for writing."""


class UnsettledError(OSError):
    """It is not known whether the bytes were written. They are kept, and completed later."""


class NotOursError(OSError):
    """The file is not what its writer left: it was deleted, cut or extended by someone else."""


class AppendedFile(ABC):
    """What is appended to a file, or to a group of files, until it is known to be written."""

    pending = b""

    @property
    @abstractmethod
    def path(self) -> str:
        """The file that was written last, or is being written."""

    @abstractmethod
    def _complete(self) -> None:
        """Write the pending bytes, as far as they are not there yet."""

    @abstractmethod
    def _undo(self) -> bool:
        """Remove the pending bytes, or find that they are not there. Return whether that is known."""

    def append(self, content: bytes) -> None:
        """Append to the file.

        Raises:
            UnsettledError: it is not known whether the content was written.
            NotOursError: the file was changed by someone else; the content is `pending`.
            OSError: the file system failed; nothing of the content is in the file.
        """
        self.settle()
        self.pending = content
        try:
            self._try_twice()
        except NotOursError:
            raise
        except OSError as error:
            if not self._undo():
                raise UnsettledError(error.errno, error.strerror, self.path) from error
            self.pending = b""
            raise

    def settle(self) -> None:
        """Complete an append whose result is not known.

        Raises:
            NotOursError: the file was changed by someone else; the content is `pending`.
            OSError: the file system failed; the result is still not known.
        """
        if self.pending:
            self._complete()

    def _try_twice(self) -> None:
        """Write the pending bytes; after an error, look what is there, and complete it."""
        try:
            self._complete()
        except NotOursError:
            raise
        except OSError as error:
            try:
                self._complete()
            except NotOursError:
                raise
            except OSError:
                raise error from None


class GrowingFile(AppendedFile):
    """A local file that only grows. The first append creates it.

    Args:
        path: the file, in a folder that only this writer writes to.
        head: the bytes with which the file begins.
        flushed: whether the first append waits for the disk, see `files.write_new`.
    """

    def __init__(self, path: str, head: bytes, *, flushed: bool = False) -> None:
        self._path, self._head, self._flushed = path, head, flushed
        self._end = 0

    @property
    def path(self) -> str:
        """The file."""
        return self._path

    def _complete(self) -> None:
        """Write the pending bytes at their offset, as far as they are not there yet."""
        try:
            descriptor = os.open(self.path, os.O_RDWR | files.BINARY)
        except OSError as error:
            is_gone = self._end and isinstance(error, FileNotFoundError)
            if is_gone or error.errno in _NO_FILE:
                raise NotOursError(error.errno, "the file was deleted", self.path) from error
            if not isinstance(error, FileNotFoundError):
                raise
            self._create()
            return
        missing = b""
        try:
            missing = self._missing(descriptor)
            _write(descriptor, missing)
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(descriptor)
            raise
        try:
            os.close(descriptor)
        except OSError:
            if missing:  # network file systems tell only here that a write failed
                raise
        self._is_written()

    def _create(self) -> None:
        files.write_new(self.path, lambda stream: stream.write(self._added()), flushed=self._flushed)
        self._is_written()

    def _added(self) -> bytes:
        """Return the bytes that come after those that are known to be in the file."""
        return self.pending if self._end else self._head + self.pending

    def _is_written(self) -> None:
        self._end, self.pending = self._end + len(self._added()), b""

    def _missing(self, descriptor: int) -> bytes:
        """Return the pending bytes that the file lacks, and go to its end."""
        added, status = self._added(), os.fstat(descriptor)
        there = None
        if stat.S_ISREG(status.st_mode) and status.st_size >= self._end:
            there = files.read_from(descriptor, self._end, len(added) + 1)
        if there is None or not added.startswith(there):
            raise NotOursError(0, "the file was changed by another program", self.path)
        os.lseek(descriptor, self._end + len(there), os.SEEK_SET)
        return added[len(there) :]

    def _undo(self) -> bool:
        """Truncate the file by the pending bytes. Return whether that is known to have succeeded."""
        try:
            if not self._end:
                return not files.exists(self.path)
            descriptor = os.open(self.path, os.O_RDWR | files.BINARY)
            try:
                self._missing(descriptor)
                os.ftruncate(descriptor, self._end)
            finally:
                os.close(descriptor)
        except OSError:
            return False
        return True


class PartFiles(AppendedFile):
    """One new file per append, for remote file systems, whose files cannot grow.

    Args:
        path_of: returns the path of the n-th file, from 0.
        head: the bytes with which each file begins.
    """

    def __init__(self, path_of: Callable[[int], str], head: bytes) -> None:
        self._path_of, self._head = path_of, head
        self._part = 0

    @property
    def path(self) -> str:
        """The file that was written last, or is being written."""
        return self._path_of(self._part if self.pending else max(self._part - 1, 0))

    def _complete(self) -> None:
        while not files.claim(self._path_of(self._part), self._head + self.pending):
            self._part += 1  # a file that someone else put there
        self.pending = b""
        self._part += 1

    def _undo(self) -> bool:
        try:
            return not files.exists(self.path)
        except OSError:
            return False


def _write(descriptor: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
