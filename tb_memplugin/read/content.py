"""Read the uncompressed content of a file, up to a size limit, with reports of progress."""

from __future__ import annotations

import base64
import binascii
import codecs
import io
import json
import os
import re
import sys
import tempfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, NoReturn

import numpy as np

from tb_memplugin.budget import from_environment, memory_budget, open_file, out_of_memory, too_much_memory
from tb_memplugin.errors import MemPluginError, UnreadableFileError
from tb_memplugin.trace.notes import Note

Progress = Callable[[int, int], None]
"""`progress(done_bytes, total_bytes)`; both count bytes of the stored file, compressed or not."""

STDIN = "-"
"""The path that stands for standard input, as in other programs; a file of this name is `./-`."""

ReadRange = Callable[[int, int], bytes]
"""`read(offset, count)` returns at most `count` bytes of a file."""

GZIP_MAGIC = b"\x1f\x8b"
ZIP_MAGIC = b"PK\x03\x04"
RECORDINGS = (".pkl", ".pickle", ".json", ".gz")
HEAD_BYTES = 4096
EMBEDDED = re.compile(rb"\s*<.*?add_local_files.*?\"base64\": *\"", re.DOTALL)
"""How a page of `torch.cuda._memory_viz` begins; the snapshot follows, up to a quotation mark."""

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

NO_JSON_NUMBER = re.compile(r"(?<=[:\[,])(\s*)[-+]?(?:inf|nan)(?=\s*[,}\]])", re.IGNORECASE)
"""Infinities and NaN as C++ writes them, which are not valid JSON."""

JSON_BYTES, MOST_CUTS = 1 << 18, 3
"""How many bytes of a Kineto trace are read at once, and how many places may be tried to end them between
two events: some are within one."""

_OBJECT_TO_EVENTS = re.compile(r'\s*\{.*?"traceEvents"[ \t\n\r]*:[ \t\n\r]*\[[ \t\n\r]*', re.DOTALL)
_LIST_OF_EVENTS = re.compile(r"[ \t\n\r]*\[[ \t\n\r]*(?=\{)")
_BETWEEN_EVENTS = re.compile(r"\}[ \t\n\r]*,[ \t\n\r]*(?=\{)")

Events = Iterator[list[Any]]
"""The events of a Kineto trace, in batches."""


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
        progress: called after every read.
    """

    def __init__(self, read_range: ReadRange, size: int, progress: Progress | None) -> None:
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
        offset += {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if offset < 0:
            raise ValueError("a file has no negative offsets")
        self._at = offset
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
        self._begin()

    def _begin(self) -> None:
        self._unpacked_bytes = 0
        self._members = 1
        self._member = zlib.decompressobj(zlib.MAX_WBITS | 16)
        self._waiting = b""

    def readable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Begin again: 0 is the only offset to which it moves."""
        if offset or whence != io.SEEK_SET:
            raise io.UnsupportedOperation("seek")
        self._packed.seek(0)
        self._begin()
        return 0

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
def standard_input(limit: int) -> Iterator[tuple[ReadRange, int]]:
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


def embedded_file(read: ReadRange, size: int, where: str) -> tuple[ReadRange, int]:
    """Return how to read the recording in a zip archive or in a page of memory_viz, and its bytes.

    Any other file is returned as it is.

    Raises:
        UnreadableFileError: it is an archive that is damaged or holds none, or several, or packs it; or
            markup without a snapshot.
        OSError: reading the file failed.
    """
    head = read(0, HEAD_BYTES)
    if head.startswith(ZIP_MAGIC):
        start, count = _stored_member(read, size, where)
        return (lambda offset, most: read(start + offset, max(0, min(most, count - offset)))), count
    if not head.lstrip().startswith(b"<"):
        return read, size
    page = EMBEDDED.match(head)
    if page is None:
        raise UnreadableFileError(
            "This is a page or XML, not a memory trace.",
            where=where,
            fix="Download the recording itself. Of pages, those of torch.cuda._memory_viz are read.",
        )
    return _decoded(read, size, page.end(), where)


def _stored_member(read: ReadRange, size: int, where: str) -> tuple[int, int]:
    """Return the offset and the bytes of the only pickle or JSON in a zip archive."""
    try:
        with zipfile.ZipFile(FileStream(read, size, None)) as archive:
            names = [name for name in archive.namelist() if name.endswith(RECORDINGS)]
            member = archive.getinfo(names[0]) if len(names) == 1 else None
            if member is not None:
                archive.open(member).close()  # compares the two descriptions of it
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError) as error:
        raise UnreadableFileError(
            f"The zip archive is damaged ({error}).", where=where, fix=DAMAGED_FIX
        ) from error
    if member is None or member.compress_type != zipfile.ZIP_STORED:
        raise UnreadableFileError(
            "The file in the zip archive is compressed."
            if member
            else f"The zip archive has {len(names):,} pickles and JSON files; one is read.",
            where=where,
            fix="Unpack it, and give a file of it.",
        )
    lengths = np.frombuffer(read(member.header_offset + 26, 4), "<u2")
    return member.header_offset + 30 + int(lengths.sum()), member.file_size


def _decoded(read: ReadRange, size: int, start: int, where: str) -> tuple[ReadRange, int]:
    """Return how to read what is base64 up to a quotation mark near the file's end, and its bytes."""
    last = max(start, size - HEAD_BYTES)
    end = last + len(read(last, HEAD_BYTES).partition(b'"')[0])

    def decoded(offset: int, count: int) -> bytes:
        first = start + offset // 3 * 4
        text = read(first, max(0, min(-(-(offset % 3 + count) // 3) * 4, end - first)))
        try:
            return base64.b64decode(text, validate=True)[offset % 3 :][:count]
        except binascii.Error as error:
            raise UnreadableFileError(
                f"The snapshot in the page is damaged ({error}).", where=where, fix=DAMAGED_FIX
            ) from error

    return decoded, (end - start) // 4 * 3 - read(max(start, end - 2), min(2, end - start)).count(b"=")


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


class _DamagedJsonError(Exception):
    """The content is no valid JSON; the text says where."""


def read_json(
    stream: BinaryIO, where: str, events: Callable[[Events], object] | None = None
) -> tuple[Any, tuple[Note, ...]]:
    """Return the content of a JSON file, and notes on parts that were not valid JSON.

    Infinities and NaN as C++ writes them, and control characters in strings, are accepted. So are UTF-16 and
    UTF-32 (PowerShell writes the former); invalid bytes become replacement characters. If a key appears twice
    in an object, the last value counts, and a note gives the number of such keys.

    Args:
        stream: the file, at its beginning. It is read again from there if it is not valid JSON.
        events: what takes the events of a Kineto trace, a batch at a time, so that they are never in memory
            together; what it returns is the content's `traceEvents`, also for a file that is only their list.

    Raises:
        UnreadableFileError: the content is not JSON, truncated, nested too deeply, or needs more memory than
            its budget.
        OSError: reading the stream failed.
    """
    try:
        return _Text(stream, where, mends=False).content(events)
    except _DamagedJsonError as error:
        stream.seek(0)
        text = _Text(stream, where, mends=True)
        try:
            content, notes = text.content(events)
        except _DamagedJsonError as again:
            message = str(again if text.mended else error)
            raise UnreadableFileError(message, where=where, fix=DAMAGED_FIX) from error
    absent = Note(
        f"The file contains {text.mended:,} infinities or NaNs, which are not valid JSON; they are treated "
        "as missing.",
        "not_json",
    )
    return content, (absent, *notes)


class _Text:
    """The text of a JSON file. Of a Kineto trace, only some events are in memory at a time.

    `mended` counts the numbers that became `null` because they are not valid JSON.
    """

    def __init__(self, stream: BinaryIO, where: str, *, mends: bool) -> None:
        self._stream, self._where, self._mends = stream, where, mends
        self._decoder: codecs.IncrementalDecoder | None = None
        self._text, self._before, self._cut = "", 0, ""
        self._twice: list[str] = []
        self._json = _json_decoder(self._twice)
        self.mended = 0

    def content(self, events: Callable[[Events], object] | None) -> tuple[Any, tuple[Note, ...]]:
        """Return what is in the text, as `read_json` does."""
        try:
            opening = self._opening() if events and self._more() else None
            if events is None or opening is None:
                self._twice.clear()
                self._read_rest()
                return self._decoded("", 0, self._json.decode), _doubled(self._twice)
            head, begin = opening
            rest: dict[str, Any] = {}
            taken = events(self._events(begin, rest))
            self._twice.extend(head.keys() & rest.keys())
            return {"traceEvents": taken, **head, **rest}, _doubled(self._twice)
        except (RecursionError, ValueError) as error:  # nesting; numbers of thousands of digits
            reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
            raise UnreadableFileError(
                f"The JSON cannot be read: {reason}.", where=self._where, fix=DAMAGED_FIX
            ) from error
        except MemoryError as error:
            raise out_of_memory(self._where, "The JSON") from error

    def _opening(self) -> tuple[dict[str, Any], int] | None:
        """Return what a Kineto trace says before its events, and where they begin; None for other files."""
        with suppress(json.JSONDecodeError):
            if begin := _LIST_OF_EVENTS.match(self._text):
                event, _ = self._json.raw_decode(self._text, begin.end())
                self._twice.clear()
                return ({}, begin.end()) if "ph" in event else None
            if begin := _OBJECT_TO_EVENTS.match(self._text):
                head = self._json.decode(begin[0] + "]}")
                del head["traceEvents"]
                return head, begin.end()
        return None

    def _events(self, at: int, rest: dict[str, Any]) -> Events:
        """Yield the events from a place on; add what the file says after them to `rest`."""
        is_list = self._text[:at].lstrip().startswith("[")
        opening, known = "[", len(self._twice)
        while True:
            used, at = at, 0
            for between in list(_BETWEEN_EVENTS.finditer(self._text, used))[: -MOST_CUTS - 1 : -1]:
                with suppress(json.JSONDecodeError):  # the boundary is in an event
                    batch = self._json.decode(f"[{self._text[used : between.start() + 1]}]")
                    at, opening, known = between.end(), "[0,", len(self._twice)
                    yield batch
                    break
                del self._twice[known:]
            if not self._more(at or used) or not at:
                break
            at = 0
        # The rest is decoded as if it were all, behind what opens it, so that errors are those of the file.
        self._read_rest()
        last, end = self._decoded(opening, 0, self._json.raw_decode)
        yield last[opening.count("0") :]
        end -= len(opening)
        after = self._decoded("0" if is_list else '{"traceEvents":0', end, self._json.decode)
        if not is_list and after["traceEvents"] == 0:
            del after["traceEvents"]
        rest.update({} if is_list else after)

    def _decoded(self, opening: str, at: int, decode: Callable[[str], Any]) -> Any:
        """Return what is decoded from a place on, behind an opening that stands for what was before.

        Raises:
            _DamagedJsonError: it is no JSON.
        """
        try:
            return decode(opening + self._text[at:])
        except json.JSONDecodeError as error:
            if error.pos >= len(error.doc.rstrip()):
                characters = self._before + len(self._text)
                message = f"The JSON ends too early, after {characters:,} characters: the file is truncated."
            else:
                place = self._before + at + error.pos - len(opening)
                message = f"The JSON is damaged at character {place:,} ({error.msg})."
            raise _DamagedJsonError(message) from error

    def _read_rest(self) -> None:
        """Read the rest of the file.

        Raises:
            UnreadableFileError: its objects need more memory than its budget, by its punctuation.
        """
        raw = self._stream.read()
        most = memory_budget(self._stream.tell())
        if len(raw) * MOST_PER_BYTE > most and _parsed_bytes(raw) > ESTIMATED_TOO_HIGH * most:
            raise too_much_memory(self._where, most, "The JSON")
        self._append(raw)
        self._append(b"")

    def _more(self, used: int = 0) -> bool:
        """Read on, without the characters that were used. Return whether there was more."""
        raw = self._stream.read(JSON_BYTES)
        before = len(self._text)
        self._text = self._text[used:]
        before += self._append(raw)
        self._text = self._text.lstrip(" \t\n\r")
        self._before += before - len(self._text)
        return bool(raw)

    def _append(self, raw: bytes) -> int:
        if self._decoder is None:
            encoding = json.detect_encoding(raw)
            self._decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
        text = self._decoder.decode(raw, not raw)
        if self._mends:  # up to a quote, which is in no number that has to be mended
            text = self._cut + text
            end = text.rfind('"') if raw else len(text)
            text, self._cut = text[: max(end, 0)], text[max(end, 0) :]
            text, count = NO_JSON_NUMBER.subn(r"\1null", text)
            self.mended += count
        self._text += text
        return len(text)


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


def _json_decoder(twice: list[str]) -> json.JSONDecoder:
    """Return a decoder that adds keys which appear more than once in their object to a list."""

    def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) != len(pairs):
            twice.extend(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        return fields

    return json.JSONDecoder(strict=False, object_pairs_hook=object_of)


def _doubled(keys: list[str]) -> tuple[Note, ...]:
    """Return the note on keys that appear more than once in their object."""
    if not keys:
        return ()
    many = f"{len(keys):,} keys appear more than once in their object"
    return (Note(f"{many}, the first {keys[0][:80]!r}: the last value of each is used.", "keys_repeated"),)
