"""What a file holds, unpacked: within a limit, with word of the progress, whatever its name says."""

from __future__ import annotations

import io
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any, BinaryIO, NoReturn

from tb_memplugin.errors import MemPluginError, UnreadableFileError

Progress = Callable[[int, int], None]
"""`progress(done_bytes, total_bytes)`, both of the file as it lies there, packed or not."""

GZIP_MAGIC = b"\x1f\x8b"
PIECE_BYTES = 1 << 18
READ_BYTES = 4 << 20

MANY_MEMBERS, SMALL_MEMBER = 10_000, 1 << 10
"""A gzip file of so many members, of fewer bytes each on average, only takes time."""

LIMIT_VARIABLE = "TB_MEMPLUGIN_LIMIT_BYTES"
SHARE_OF_MEMORY = 4
"""A trace or snapshot takes some 4 to 10 times its bytes in memory: a larger share than this never fits."""

SMALLEST_DEFAULT = 2 << 30

DAMAGED_FIX = "Copy the file again, or export it anew."

NO_JSON_NUMBER = re.compile(r"(?<=[:\[,])(\s*)[-+]?(?:inf|nan)(?=\s*[,}\]])", re.IGNORECASE)
"""What C++ writes for infinities and NaN, which is no JSON."""


def content_limit(limit_bytes: int | None) -> int:
    """How many bytes a file's content may have: as given, as the environment says, or a share of the memory.

    Raises:
        MemPluginError: what was given is no number of bytes.
    """
    if limit_bytes is not None:
        if limit_bytes <= 0:
            raise MemPluginError("limit_bytes is not positive.", where="load", fix="Give a number of bytes.")
        return limit_bytes
    told = os.environ.get(LIMIT_VARIABLE)
    if not told:
        return max(_memory_bytes() // SHARE_OF_MEMORY, SMALLEST_DEFAULT)
    if not (told.isascii() and told.isdigit() and 0 < len(told) < 20 and int(told)):
        raise MemPluginError(
            f"{LIMIT_VARIABLE} is {told[:80]!r}, which is no number of bytes.",
            where="the environment",
            fix=f"Set it to a whole number: export {LIMIT_VARIABLE}=8000000000",
        )
    return int(told)


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not told here
        return 0


class FileStream(io.RawIOBase):
    """A file that is read by ranges, as a stream that tells its progress.

    Args:
        read_range: `read_range(offset, count)` gives at most `count` bytes.
        size: of the file, bytes.
        progress: called after every read.
    """

    def __init__(self, read_range: Callable[[int, int], bytes], size: int, progress: Progress | None) -> None:
        self._read_range = read_range
        self._size = size
        self._progress = progress
        self._at = 0

    def readable(self) -> bool:
        """It is."""
        return True

    def seekable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """The place of the next byte."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to another place in the file."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read(self, count: int = -1) -> bytes:
        """The next bytes, all of them where no count is given."""
        if count < 0:
            pieces = []
            while piece := self.read(READ_BYTES):
                pieces.append(piece)
            return b"".join(pieces)
        data = self._read_range(self._at, count)
        self._at += len(data)
        if self._progress is not None:
            self._progress(min(self._at, self._size), self._size)
        return data


class GzipStream(io.RawIOBase):
    """The content of a gzip file, of one member or several, up to a limit.

    Raises (on reading):
        UnreadableFileError: damaged, truncated, or more than `limit` bytes.
    """

    def __init__(self, packed: BinaryIO, where: str, limit: int) -> None:
        self._packed = packed
        self._where = where
        self._limit = limit
        self._given = 0
        self._members = 1
        self._member = zlib.decompressobj(zlib.MAX_WBITS | 16)
        self._waiting = b""

    def readable(self) -> bool:
        """It is."""
        return True

    def tell(self) -> int:
        """Bytes given so far."""
        return self._given

    def read(self, count: int = -1) -> bytes:
        """The next bytes, all of them where no count is given; fewer at the end."""
        found = bytearray()
        while count < 0 or len(found) < count:
            most = READ_BYTES if count < 0 else min(count - len(found), READ_BYTES)
            piece = self._unpack(most)
            if not piece:
                break
            found += piece
        return bytes(found)

    def _unpack(self, most: int) -> bytes:
        piece = b""
        while not piece:
            if self._member.eof and not self._next_member():
                return b""
            data = self._waiting or self._packed.read(PIECE_BYTES)
            if not data and not self._member.eof:
                self._refuse("The gzip file ends too early: it is truncated.")
            try:
                piece = self._member.decompress(data, most)
            except zlib.error as error:
                self._refuse(f"The gzip file is damaged ({error}).")
            self._waiting = self._member.unconsumed_tail
        self._given += len(piece)
        if self._given > self._limit:
            raise too_large(self._limit, self._where)
        return piece

    def _next_member(self) -> bool:
        rest = (self._member.unused_data or self._packed.read(PIECE_BYTES)).lstrip(b"\0")
        self._member = zlib.decompressobj(zlib.MAX_WBITS | 16)
        self._waiting = rest
        self._members += 1
        if self._members > MANY_MEMBERS and self._given < self._members * SMALL_MEMBER:
            self._refuse(f"The gzip file consists of {self._members:,} members with hardly anything in them.")
        return bool(rest)

    def _refuse(self, what: str) -> NoReturn:
        raise UnreadableFileError(what, where=self._where, fix=DAMAGED_FIX)


def too_large(limit: int, where: str) -> UnreadableFileError:
    """The error for a content beyond the limit."""
    return UnreadableFileError(
        f"The content has more than {limit:,} bytes, the most that is read, lest a file fills the memory.",
        where=where,
        fix=f"If you trust the file, pass limit_bytes=... or set {LIMIT_VARIABLE} to a larger number.",
    )


def read_json(stream: BinaryIO, where: str) -> tuple[object, tuple[str, ...]]:
    """The content of a JSON file, and notes on what in it was no JSON.

    Infinities and NaN as C++ writes them, and control characters within texts, are put up with; bytes
    that are no UTF-8 become replacement characters. Of keys that stand twice in an object the last counts,
    and a note says how often that was.

    Raises:
        UnreadableFileError: it is no JSON, truncated, or nested too deeply.
        OSError: the stream does.
    """
    raw = stream.read()
    text = raw.decode("utf-8-sig", errors="replace")
    del raw
    try:
        return _parsed(text, where)
    except json.JSONDecodeError as error:
        mended, count = NO_JSON_NUMBER.subn(r"\1null", text)
        if not count:
            raise _broken(text, error, where) from error
        del text
    try:
        content, notes = _parsed(mended, where)
    except json.JSONDecodeError as error:
        raise _broken(mended, error, where) from error
    absent = f"{count:,} infinities and NaNs stand in the file, which JSON has not; read as absent."
    return content, (absent, *notes)


def _parsed(text: str, where: str) -> tuple[object, tuple[str, ...]]:
    twice: list[str] = []

    def made(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            twice.extend(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        return found

    try:
        content = json.loads(text, strict=False, object_pairs_hook=made)
    except json.JSONDecodeError:
        raise
    except (RecursionError, ValueError) as error:  # nesting; numbers of thousands of digits
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise UnreadableFileError(
            f"The JSON cannot be read: {reason}.", where=where, fix=DAMAGED_FIX
        ) from error
    except MemoryError as error:
        raise UnreadableFileError(
            "The JSON needs more memory than there is.",
            where=where,
            fix="Load it where there is more memory.",
        ) from error
    return content, _doubled(twice)


def _doubled(keys: list[str]) -> tuple[str, ...]:
    """The note on keys that stand more than once in their object."""
    if not keys:
        return ()
    many = f"{len(keys):,} keys stand more than once in their object"
    return (f"{many}, the first {keys[0][:80]!r}: the last value of each counts.",)


def _broken(text: str, error: json.JSONDecodeError, where: str) -> UnreadableFileError:
    if error.pos >= len(text.rstrip()):
        what = f"The JSON ends too early, after {len(text):,} characters: the file is truncated."
    else:
        what = f"The JSON is damaged at character {error.pos:,} ({error.msg})."
    return UnreadableFileError(what, where=where, fix=DAMAGED_FIX)
