"""TFRecord framing of event files: length, checksum, data, checksum.

TensorBoard's own writer computes CRC-32C byte by byte in Python, at about 10 MB/s; this module uses numpy.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import numpy.typing as npt

UInt32 = npt.NDArray[np.uint32]

_HEAD = struct.Struct("<QI")  # length, its masked CRC
_POLYNOMIAL = 0x82F63B78  # Castagnoli, bits reversed
_BLOCK_LEVEL = 9
_BLOCK = 1 << _BLOCK_LEVEL  # larger blocks are quicker, but building their table takes longer
_SHORT = 56  # bytes below which the plain loop is quicker
_ALL = 0xFFFFFFFF

MOST_RECORD = 16 << 20
"""The largest record that is read, in bytes: ours have at most a few megabytes."""

MOST_WRONG = 64 << 20
"""After so many bytes in records whose checksum is wrong, the rest of a file is not searched for others."""

MOST_SEARCHED = 1 << 30
"""After so many bytes that are in no intact record, the rest of a file is not searched: it may be a sparse
file of a terabyte. A search takes about 2 seconds for a gigabyte of zeros, and 16 for one of random bytes.
"""

_SEARCHED = 1 << 18
"""How many bytes are searched at once for the begin of the next intact record."""


def record(data: bytes) -> bytes:
    """Return the data as one record of an event file."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked(crc32c(length))) + data + struct.pack("<I", masked(crc32c(data)))


def records(read: Callable[[int, int], bytes], size: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield the data of each intact record, and the offsets of its begin and end in the file.

    What lies between two of them, or after the last one, is damaged, foreign, or still being written.

    Args:
        read: returns a range of the file's bytes.
        size: the file's size in bytes.
    """
    at, wrong, left = 0, 0, MOST_SEARCHED
    begin = _next_head(read, size, at, left)
    while begin is not None and wrong <= MOST_WRONG:
        left -= begin - at
        start, end = _body(read(begin, _HEAD.size), begin)
        body = read(start, end - start) if end - start <= MOST_RECORD else b""
        is_whole = _is_whole(body)
        if is_whole:
            yield body[:-4], begin, end
        else:
            wrong += len(body)
        at = end if is_whole else begin + 1
        begin = _next_head(read, size, at, left)


def _next_head(read: Callable[[int, int], bytes], size: int, at: int, most: int) -> int | None:
    """Return the first offset, from `at` on, of the head of a record that ends within the file.

    About `most` bytes are searched. Returns None if there is none in them.
    """
    if _is_head(read(at, _HEAD.size), at, size):
        return at
    last = min(size - _HEAD.size, at + most)
    while at <= last:
        block = np.frombuffer(read(at, _SEARCHED), np.uint8)
        count = len(block) - _HEAD.size + 1
        if count <= 0:
            return None  # the file was cut meanwhile
        if not block.any():  # what a crash or a sparse file leaves: zeros are no head
            at += count
            continue
        crcs = np.full(count, _ALL, np.uint32)
        for place in range(8):
            byte = block[place : place + count] ^ np.uint8(0xFF if place < 4 else 0)
            crcs ^= _block_table()[(_BLOCK - 8 + place) * 256 :][:256].take(byte)
        crcs = ((crcs >> 15) | (crcs << 17)) + np.uint32(0xA282EAD8)
        stored = np.zeros(count, np.uint32)
        for place in range(4):
            stored |= block[8 + place : 8 + place + count].astype(np.uint32) << np.uint32(8 * place)
        for offset in np.flatnonzero(crcs == stored).tolist():
            if _is_head(block[offset : offset + _HEAD.size].tobytes(), at + offset, size):
                return at + int(offset)
        at += count
    return None


def _is_head(head: bytes, begin: int, size: int) -> bool:
    """Whether bytes at an offset are the head of a record that ends within the file."""
    if len(head) < _HEAD.size or masked(crc32c(head[:8])) != _HEAD.unpack(head)[1]:
        return False
    return _body(head, begin)[1] <= size


def _body(head: bytes, begin: int) -> tuple[int, int]:
    """Return the offsets at which the data of the record with a head begins, and the record ends."""
    start = begin + _HEAD.size
    return start, start + int(_HEAD.unpack(head)[0]) + 4


def checked(read: Callable[[int, int], bytes], begin: int, size: int) -> Iterator[tuple[int, bytes | None]]:
    """Yield the offset of the end of each complete record, and its data; None if its checksum is wrong.

    Args:
        read: returns a range of the file's bytes.
        begin: the offset of the first record to check.
        size: the file's size in bytes.
    """
    for start, end in _bodies(read, size, begin):
        body = read(start, end - start) if end - start <= MOST_RECORD else b""
        yield end, body[:-4] if _is_whole(body) else None


def _is_whole(body: bytes) -> bool:
    """Whether the checksum at the end of a record's data is right."""
    return struct.pack("<I", masked(crc32c(body[:-4]))) == body[-4:]


def framed(read: Callable[[int, int], bytes], size: int) -> int:
    """Return the offset at which the last complete record ends. Only lengths are checked, not the data."""
    return max((end for _, end in _bodies(read, size)), default=0)


def is_cut(read: Callable[[int, int], bytes], size: int, end: int) -> bool:
    """Whether what follows the record that ends at an offset is at most the beginning of another."""
    head = read(end, _HEAD.size)
    if len(head) < _HEAD.size:
        return True
    return masked(crc32c(head[:8])) == _HEAD.unpack(head)[1] and _body(head, end)[1] > size


def _bodies(read: Callable[[int, int], bytes], size: int, end: int = 0) -> Iterator[tuple[int, int]]:
    """Yield where the data of each complete record begins and where it ends, from the record at `end` on."""
    while _is_head(head := read(end, _HEAD.size), end, size):
        begin, end = _body(head, end)
        yield begin, end


def masked(crc: int) -> int:
    """Return a CRC masked as TFRecord stores it: rotated and offset, so that CRCs of CRCs stay reliable."""
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & _ALL


def crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli). A CRC is linear, so blocks are computed in parallel, then combined."""
    if len(data) < _SHORT:
        crc = _ALL
        for byte in data:
            crc = _table_list()[(crc ^ byte) & 0xFF] ^ (crc >> 8)
        return crc ^ _ALL
    levels = max((len(data) - 1) // _BLOCK, 0).bit_length()
    # Zeros in front change nothing while the register is 0; its start value goes into the first 4 bytes.
    front = (-len(data)) % _BLOCK
    padded = np.zeros(front + len(data), np.uint8)
    padded[front:] = np.frombuffer(data, np.uint8)
    padded[front : front + 4] ^= 0xFF
    flat = padded.reshape(-1, _BLOCK) + _ROW_STARTS
    crcs: UInt32 = np.bitwise_xor.reduce(_block_table().take(flat), axis=1)
    for level in range(levels):
        if len(crcs) % 2:
            crcs = np.concatenate((np.zeros(1, np.uint32), crcs))
        crcs = _shifted(crcs[0::2], _shift_table(_BLOCK_LEVEL + level)) ^ crcs[1::2]
    return int(crcs[0]) ^ _ALL


_ROW_STARTS = np.arange(_BLOCK, dtype=np.int32) * 256


@cache
def _table() -> UInt32:
    crc = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        crc = (crc >> 1) ^ np.where(crc & 1, np.uint32(_POLYNOMIAL), np.uint32(0))
    return crc


@cache
def _table_list() -> list[int]:
    return [int(value) for value in _table()]


@cache
def _block_table() -> UInt32:
    """Return the contribution of each byte value at each position to a block's CRC: shape (512 * 256,).

    A CRC is linear: those of the 8 single bits are computed, and combined to those of all byte values.
    """
    bits = _table()[1 << np.arange(8)][None, :]
    for level in range(_BLOCK_LEVEL):
        bits = np.concatenate((_shifted(bits, _shift_table(level)), bits))
    table = np.zeros((_BLOCK, 256), np.uint32)
    for bit in range(8):
        value = 1 << bit
        np.bitwise_xor(table[:, :value], bits[:, bit : bit + 1], out=table[:, value : 2 * value])
    return table.reshape(-1)


@cache
def _shift_table(level: int) -> UInt32:
    """Return what each byte of a CRC contributes after 2**level zero bytes: shape (4, 256)."""
    if level:
        half = _shift_table(level - 1)
        return _shifted(half, half)
    words = np.arange(256, dtype=np.uint32)[None, :] << np.arange(0, 32, 8, dtype=np.uint32)[:, None]
    shifted: UInt32 = _table()[words & 0xFF] ^ (words >> 8)
    return shifted


def _shifted(crcs: UInt32, table: UInt32) -> UInt32:
    out: UInt32 = table[0][crcs & 0xFF]
    for byte in range(1, 4):
        out = out ^ table[byte][(crcs >> (8 * byte)) & 0xFF]
    return out
