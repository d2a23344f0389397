"""Read the uncompressed content of a file, up to a size limit, with reports of progress."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, NoReturn

import numpy as np

from tb_memplugin.budget import (
    from_environment,
    memory_budget,
    open_content,
    open_file,
    out_of_memory,
    too_much_memory,
)
from tb_memplugin.errors import MemPluginError, UnreadableFileError
from tb_memplugin.trace.notes import Note

Progress = Callable[[int, int], None]
"""`progress(done_bytes, total_bytes)`; both count bytes of the stored file, compressed or not."""

STDIN = "-"
"""The path that stands for standard input, as in other programs; a file of this name is `./-`."""

GZIP_MAGIC = b"\x1f\x8b"
PIECE_BYTES = 1 << 18
READ_BYTES = 4 << 20

MANY_MEMBERS, SMALL_MEMBER = 10_000, 1 << 10
"""A gzip file with more members than this, of fewer bytes each on average, is refused: it only takes time."""

UNPACKED_OF_ANY_FILE, UNPACKED_PER_BYTE = 64 << 20, 100
"""What a gzip file may unpack to unless a limit is set: any one, in bytes, and for each byte of a larger one.
Strangers' recordings unpack to 4 to 46 times their size; gzip can make a thousand bytes of one."""

LIMIT_VARIABLE = "TB_MEMPLUGIN_LIMIT_BYTES"
SHARE_OF_MEMORY = 4
"""The default limit is the machine's memory divided by this: a loaded trace or snapshot needs about 4 to 10
times its bytes in memory."""

SMALLEST_DEFAULT = 2 << 30

DAMAGED_FIX = "Copy the file again, or export it again."

MOST_PER_BYTE = 64
"""More memory than a byte of JSON can take when it is parsed."""

ESTIMATED_TOO_HIGH = 1.5
"""How many times its budget JSON may take by its estimate, which is too high for strangers' traces."""

UNREAD_CATEGORIES = frozenset(
    (
        "kernel",
        "gpu_memcpy",
        "gpu_memset",
        "cuda_runtime",
        "cuda_driver",
        "ac2g",
        "gpu_user_annotation",
        "overhead",
    )
)
"""Values of `cat` of a Kineto trace's events that no reader asks for: most of a GPU's trace."""

NO_JSON_NUMBER = re.compile(r"(?<=[:\[,])(\s*)[-+]?(?:inf|nan)(?=\s*[,}\]])", re.IGNORECASE)
"""Infinities and NaN as C++ writes them, which are not valid JSON."""


def content_limit(limit_bytes: int | None, packed_bytes: int | None = None) -> int:
    """Return the size limit of a file's content: the argument, the environment's, or a share of the memory.

    Args:
        limit_bytes: the argument; None: not given.
        packed_bytes: the size of the file if it is compressed: without a limit from outside, its content is
            also limited by `UNPACKED_PER_BYTE`.

    Raises:
        MemPluginError: the argument or the environment variable is not a positive number of bytes.
    """
    if limit_bytes is not None and limit_bytes <= 0:
        raise MemPluginError("limit_bytes must be above 0.", where="load", fix="Give a number of bytes.")
    limit = limit_bytes or from_environment(LIMIT_VARIABLE, "bytes")
    if limit is not None:
        return limit
    most = max(_memory_bytes() // SHARE_OF_MEMORY, SMALLEST_DEFAULT)
    if packed_bytes is None:
        return most
    return min(most, max(UNPACKED_OF_ANY_FILE, UNPACKED_PER_BYTE * packed_bytes))


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not available on this system
        return 0


class FileStream(io.RawIOBase):
    """A stream over a file that is read by byte ranges; it reports its progress.

    Args:
        read_range: `read_range(offset, count)` returns at most `count` bytes.
        size: the size of the file in bytes.
        progress: called after every read.
    """

    def __init__(self, read_range: Callable[[int, int], bytes], size: int, progress: Progress | None) -> None:
        self._read_range = read_range
        self._size = size
        self._progress = progress
        self._at = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the offset of the next byte."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to another offset in the file and return it."""
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read(self, count: int = -1) -> bytes:
        """Return up to `count` next bytes, or all remaining bytes if `count` is negative."""
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
    """A stream over the uncompressed content of a gzip file with one or several members, up to a limit.

    Raises (on reading):
        UnreadableFileError: the file is damaged or truncated, or its content exceeds `limit` bytes.
    """

    def __init__(self, packed: BinaryIO, where: str, limit: int) -> None:
        self._packed = packed
        self._where = where
        self._limit = limit
        self._unpacked_bytes = 0
        self._members = 1
        self._member = zlib.decompressobj(zlib.MAX_WBITS | 16)
        self._waiting = b""

    def readable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the number of uncompressed bytes that were read so far."""
        return self._unpacked_bytes

    def read(self, count: int = -1) -> bytes:
        """Return the next `count` bytes, fewer at the end; all remaining bytes if `count` is negative."""
        content = bytearray()
        while count < 0 or len(content) < count:
            most = READ_BYTES if count < 0 else min(count - len(content), READ_BYTES)
            piece = self._unpack(most)
            if not piece:
                break
            content += piece
        return bytes(content)

    def _unpack(self, most: int) -> bytes:
        piece = b""
        while not piece:
            if self._member.eof and not self._next_member():
                return b""
            data = self._waiting or self._packed.read(PIECE_BYTES)
            if not data and not self._member.eof:
                self._refuse("The gzip file is truncated.")
            try:
                piece = self._member.decompress(data, most)
            except zlib.error as error:
                self._refuse(f"The gzip file is damaged ({error}).")
            self._waiting = self._member.unconsumed_tail
        self._unpacked_bytes += len(piece)
        if self._unpacked_bytes > self._limit:
            raise too_large(self._limit, self._where)
        open_content(self._unpacked_bytes)
        return piece

    def _next_member(self) -> bool:
        rest = (self._member.unused_data or self._packed.read(PIECE_BYTES)).lstrip(b"\0")
        if not rest:
            return False
        self._member = zlib.decompressobj(zlib.MAX_WBITS | 16)
        self._waiting = rest
        self._members += 1
        if self._members > MANY_MEMBERS and self._unpacked_bytes < self._members * SMALL_MEMBER:
            self._refuse(f"The gzip file consists of {self._members:,} members that are almost empty.")
        return True

    def _refuse(self, message: str) -> NoReturn:
        raise UnreadableFileError(message, where=self._where, fix=DAMAGED_FIX)


@contextmanager
def standard_input(limit: int) -> Iterator[tuple[Callable[[int, int], bytes], int]]:
    """Copy standard input to a temporary file; yield a function that reads byte ranges, and its bytes.

    Raises:
        UnreadableFileError: it has more than `limit` bytes, or none.
    """
    with tempfile.TemporaryFile() as copy:
        size = 0
        while part := sys.stdin.buffer.read(READ_BYTES):
            size += copy.write(part)
            if size > limit:
                raise too_large(limit, STDIN)
        if not size:
            raise UnreadableFileError(
                "Standard input is empty.", where=STDIN, fix="Send one file to the command, and read it once."
            )
        open_file(STDIN, size)

        def read(offset: int, count: int) -> bytes:
            copy.seek(offset)
            return copy.read(count)

        yield read, size


def too_large(limit: int, where: str) -> UnreadableFileError:
    """Return the error for content that exceeds the limit."""
    return UnreadableFileError(
        f"The unpacked content is larger than the limit of {limit:,} bytes, which keeps a file from "
        "filling the memory.",
        where=where,
        fix=(
            "If you trust the file, raise the limit: give a command --limit-bytes, load() limit_bytes=, "
            f"or set {LIMIT_VARIABLE}."
        ),
    )


def read_json(stream: BinaryIO, where: str) -> tuple[object, tuple[Note, ...]]:
    """Return the content of a JSON file, and notes on parts that were not valid JSON.

    Infinities and NaN as C++ writes them, and control characters in strings, are accepted. So are UTF-16 and
    UTF-32 (PowerShell writes the former); invalid bytes become replacement characters. If a key appears twice
    in an object, the last value counts, and a note gives the number of such keys. Events of a Kineto trace
    that are of `UNREAD_CATEGORIES` become one empty event: a GPU's trace then takes half the memory.

    Raises:
        UnreadableFileError: the content is not JSON, truncated, nested too deeply, or needs more memory than
            its budget.
        OSError: reading the stream failed.
    """
    raw = stream.read()
    _check_memory(raw, where)
    text = raw.decode(json.detect_encoding(raw), errors="replace")
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
    absent = Note(
        f"The file contains {count:,} infinities or NaNs, which are not valid JSON; they are treated as "
        "missing.",
        "not_json",
    )
    return content, (absent, *notes)


def _check_memory(raw: bytes, where: str) -> None:
    """Refuse JSON whose objects would need more memory than its budget, judged by its punctuation.

    Raises:
        UnreadableFileError: the objects need more.
    """
    most = memory_budget(len(raw))
    if len(raw) * MOST_PER_BYTE > most and _parsed_bytes(raw) > ESTIMATED_TOO_HIGH * most:
        raise too_much_memory(where, most, "The JSON")


def _parsed_bytes(raw: bytes) -> int:
    """Estimate the memory of parsed JSON, in bytes, by what CPython's objects take.

    It is at least 0.7 times what a text takes that was made to take most. For strangers' files it is 1.1 to
    1.8 times what they take, and at most 12 times their size.
    """
    counts = np.zeros(256, np.int64)
    data = np.frombuffer(raw, np.uint8)
    for begin in range(0, len(data), PIECE_BYTES):
        counts += np.bincount(data[begin : begin + PIECE_BYTES], minlength=256)
    lists, dicts, pairs, commas, quotes = (int(counts[byte]) for byte in b'[{:,"')
    texts = max(0, quotes // 2 - pairs)  # keys are counted as pairs
    numbers = max(0, commas - texts)
    width = 4 if counts[0xF0:].any() else 2 if counts[0xC4:].any() else 1  # bytes that each character takes
    return width * len(raw) + 64 * lists + 120 * dicts + 90 * pairs + 9 * commas + 50 * texts + 30 * numbers


def _parsed(text: str, where: str) -> tuple[object, tuple[Note, ...]]:
    twice: list[str] = []
    unread = {"ph": ""}  # still an event

    def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) != len(pairs):
            twice.extend(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        category = fields.get("cat")
        is_unread = type(category) is str and category in UNREAD_CATEGORIES and "ph" in fields
        return unread if is_unread else fields

    try:
        content = json.loads(text, strict=False, object_pairs_hook=object_of)
    except json.JSONDecodeError:
        raise
    except (RecursionError, ValueError) as error:  # nesting; numbers of thousands of digits
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
        raise UnreadableFileError(
            f"The JSON cannot be read: {reason}.", where=where, fix=DAMAGED_FIX
        ) from error
    except MemoryError as error:
        raise out_of_memory(where, "The JSON") from error
    return content, _doubled(twice)


def _doubled(keys: list[str]) -> tuple[Note, ...]:
    """Return the note on keys that appear more than once in their object."""
    if not keys:
        return ()
    many = f"{len(keys):,} keys appear more than once in their object"
    return (Note(f"{many}, the first {keys[0][:80]!r}: the last value of each is used.", "keys_repeated"),)


def _broken(text: str, error: json.JSONDecodeError, where: str) -> UnreadableFileError:
    if error.pos >= len(text.rstrip()):
        message = f"The JSON ends too early, after {len(text):,} characters: the file is truncated."
    else:
        message = f"The JSON is damaged at character {error.pos:,} ({error.msg})."
    return UnreadableFileError(message, where=where, fix=DAMAGED_FIX)
