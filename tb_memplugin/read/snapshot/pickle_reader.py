"""Feed a pickle's bytes to the unpickler, and refuse lengths and memo indices larger than the data allows.

CPython's unpickler allocates memory for any memo index that it reads (`LONG_BINPUT`, `PUT`): 64 GiB for six
bytes. A valid index counts the objects stored before it, so it never exceeds the bytes read so far. Numpy
finds the places where a larger index may be, and each buffer passed to the unpickler ends before such a
place. There the unpickler has to request more bytes, and the number that it requests shows whether the place
is an opcode's argument or inside some text or number. Frames, which are requested as a whole, are dissolved.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import BinaryIO, NoReturn

import numpy as np

from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.trace.tables import Int64, UInt8

CHUNK_BYTES = 1 << 20

HARMLESS_INDEX = 1 << 20
"""Memo indices up to this (16 MiB of memory) are accepted in any pickle."""

LONG_BINPUT, PUT, FRAME = b"r"[0], b"p"[0], 0x95
INDEX_BYTES, LENGTH_BYTES = 4, 8
BYTES_OPCODES = {b"B"[0]: INDEX_BYTES, 0x8E: LENGTH_BYTES, 0x96: LENGTH_BYTES}
"""BINBYTES, BINBYTES8 and BYTEARRAY8, with the width of their lengths. The unpickler allocates what they
claim before reading it. Lengths below 16 MiB are harmless."""

LONGEST_FRAME = 1 << 32
"""Frames of this many bytes or more are refused; Python writes frames of 64 KiB."""

LONG_TEXT = 6
"""An index written as text is checked if it has at least this many characters."""

NUMBER_CHARACTERS = np.isin(np.arange(256), list(b"0123456789+-_ \t\r\v\f"))
"""Characters that may be in such an index."""

OVERLAP = 16
"""The number of bytes at a chunk's end from which an argument may extend into the next chunk."""

DAMAGED_FIX = "Copy the file again, or take a new snapshot: torch.cuda.memory._dump_snapshot(path)."


class PickleReader:
    """The stream that the unpickler reads, in chunks; requests beyond the end of the file are refused.

    Args:
        stream: a binary stream at the pickle's first byte.
        watch: called before each further chunk with the number of bytes read so far; may raise.
    """

    def __init__(self, stream: BinaryIO, where: str, watch: Callable[[int], None]) -> None:
        self._stream = stream
        self._where = where
        self._watch = watch
        self._chunk = b""
        self._at = 0
        self._offset = 0
        self._scanner = _Scanner()
        self._stops: list[int] = []
        self._stop = 0
        self._left = _bytes_left(stream)

    @property
    def position(self) -> int:
        """The number of bytes read so far."""
        return self._offset + self._at

    def goes_on(self) -> bool:
        """Whether more bytes follow than zeros, with which memory_viz fills up."""
        rest = self._chunk[self._at :] + self._stream.read(1)
        return bool(rest.strip(b"\0"))

    def read(self, count: int) -> bytes:
        """Return the next `count` bytes, fewer at the end of the stream.

        Raises:
            UnreadableFileError: there are fewer bytes, or they are an argument that no valid pickle has.
        """
        at = self._at
        if at == self._stop and at and count in (INDEX_BYTES, LENGTH_BYTES):
            return self._argument(count)
        end = at + count
        if count >= 0 and end <= len(self._chunk):
            self._at = end
            return self._chunk[at:end]
        return self._across(count)

    def readinto(self, buffer: memoryview) -> int:
        """Fill a buffer. The unpickler uses this only for the rest of a bytes object.

        Raises:
            UnreadableFileError: there are fewer bytes.
        """
        data = self._across(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def peek(self, _count: int) -> bytes:
        """Return the bytes up to the next place where a hostile argument may begin; none at such a place."""
        at = self._at
        if at > self._stop:
            self._advance(at)
        return self._chunk[at : self._stop]

    def readline(self) -> bytes:
        """Return the next line including its line end.

        Raises:
            UnreadableFileError: it is a memo index that no valid pickle has.
        """
        begin = self._at
        self._advance(begin)
        is_index = begin == self._stop and begin > 0 and self._chunk[begin - 1] == PUT
        line = bytearray()
        while True:
            if self._at >= len(self._chunk):
                self._next_chunk()
            rest = self._chunk[self._at :]
            end = rest.find(b"\n") + 1
            line += rest[: end or len(rest)]
            self._at += end or len(rest)
            if end or not rest:
                break
        self._advance(self._at)
        if is_index:
            self._check_index(_number(bytes(line)))
        return bytes(line)

    def _next_chunk(self) -> None:
        self._offset += len(self._chunk)
        self._chunk, self._at = self._stream.read(CHUNK_BYTES), 0
        if self._left is not None:
            self._left -= len(self._chunk)
        self._watch(self._offset)
        bound = max(HARMLESS_INDEX, self._offset + len(self._chunk))
        self._stops = [len(self._chunk), *self._scanner.stops(self._chunk, bound)[::-1].tolist()]
        self._stop = self._stops.pop()

    def _advance(self, at: int) -> None:
        stops = self._stops
        while self._stop < at:
            self._stop = stops.pop()

    def _argument(self, count: int) -> bytes:
        """Return and check the bytes at a place where the unpickler requests the length of an argument."""
        opcode = self._chunk[self._at - 1]
        data = self._across(count)
        number = int.from_bytes(data, "little")
        if opcode == LONG_BINPUT and count == INDEX_BYTES:
            self._check_index(number)
        elif opcode == FRAME and count == LENGTH_BYTES and len(data) == LENGTH_BYTES:
            self._check_frame(number)
            return bytes(LENGTH_BYTES)
        elif BYTES_OPCODES.get(opcode) == count:
            self._check_claim(number)
        return data

    def _across(self, count: int) -> bytes:
        """Return bytes that extend beyond the current chunk."""
        opcode_at = self._at - LENGTH_BYTES - 1
        if count >= LONGEST_FRAME and opcode_at >= 0 and self._chunk[opcode_at] == FRAME:
            self._check_frame(count)
        self._check_length(count)
        parts = []
        missing = count
        while missing > 0:
            if self._at >= len(self._chunk):
                self._next_chunk()
                if not self._chunk:
                    break
            part = self._chunk[self._at : self._at + missing]
            self._at += len(part)
            missing -= len(part)
            parts.append(part)
        self._advance(min(self._at, len(self._chunk)))
        return b"".join(parts)

    def _check_length(self, count: int) -> None:
        if self._left is None:
            return
        left = self._left + len(self._chunk) - self._at
        if count < 0 or count > left > 0:
            self._refuse(f"The pickle claims {count:,} more bytes where {left:,} are left")

    def _check_claim(self, length: int) -> None:
        """Refuse a length for which memory is allocated before its bytes are read."""
        if self._left is not None and length > self._left + len(self._chunk) - self._at:
            self._refuse(f"The pickle claims {length:,} more bytes than are left")

    def _check_frame(self, length: int) -> None:
        self._check_length(length)
        if length >= LONGEST_FRAME:
            self._refuse(f"The pickle has a frame of {length:,} bytes")

    def _check_index(self, index: int) -> None:
        if abs(index) > max(HARMLESS_INDEX, self.position):
            self._refuse(f"The pickle stores under the number {index:,} after {self.position:,} bytes")

    def _refuse(self, problem: str) -> NoReturn:
        raise UnreadableFileError(
            f"{problem}: it is truncated or damaged.", where=self._where, fix=DAMAGED_FIX
        )


def _bytes_left(stream: BinaryIO) -> int | None:
    """Return the number of bytes to a stream's end; None if it is not seekable."""
    if not stream.seekable():
        return None
    begin = stream.tell()
    size = stream.seek(0, io.SEEK_END) - begin
    stream.seek(begin)
    return size


def _number(line: bytes) -> int:
    try:
        return int(line)
    except ValueError:
        return 0  # the unpickler refuses it with its own message


class _Scanner:
    """Finds the stops: the offsets after bytes that may be an opcode with a hostile argument."""

    def __init__(self) -> None:
        self._hits = np.empty(0, np.bool_)  # reused: new pages for each chunk take longer than the scan

    def stops(self, chunk: bytes, bound: int) -> Int64:
        """Return the stops in a chunk, ascending. Memo indices up to `bound` are ignored."""
        data = np.frombuffer(chunk, np.uint8)
        inner = len(data) - OVERLAP
        if inner <= 0:
            return np.arange(1, len(data), dtype=np.int64)
        put = self._find(data, inner, LONG_BINPUT)
        put = put[(data[put + INDEX_BYTES] > 0) | (data[put + INDEX_BYTES - 1] >= HARMLESS_INDEX >> 16)]
        index = data[put + INDEX_BYTES].astype(np.int64)
        for byte in range(INDEX_BYTES - 1, 0, -1):
            index = (index << 8) | data[put + byte]
        text = self._find(data, inner, PUT)
        for character in range(1, LONG_TEXT + 1):
            text = text[NUMBER_CHARACTERS[data[text + character]]]
        frame = self._find(data, inner, FRAME)
        for byte in range(LENGTH_BYTES, INDEX_BYTES, -1):
            frame = frame[data[frame + byte] == 0]
        at_end = np.arange(inner, len(data) - 1)
        return (
            np.sort(np.concatenate((put[index > bound], text, frame, *self._long(data, inner), at_end))) + 1
        )

    def _long(self, data: UInt8, count: int) -> list[Int64]:
        """Return the offsets of opcodes that claim many bytes."""
        opcodes = [(self._find(data, count, opcode), width) for opcode, width in BYTES_OPCODES.items()]
        return [
            at[np.any([data[at + byte] for byte in range(INDEX_BYTES, width + 1)], axis=0)]
            for at, width in opcodes
        ]

    def _find(self, data: UInt8, count: int, opcode: int) -> Int64:
        if len(self._hits) < count:
            self._hits = np.empty(count, np.bool_)
        return np.flatnonzero(np.equal(data[:count], opcode, out=self._hits[:count]))
