"""Encode one block of one column of integers into few bytes, and decode it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tb_memplugin.proto.recording_pb2 import CONSTANT, DELTA, DICTIONARY, OFFSET, Chunk
from tb_memplugin.trace.replay import address_order

BLOCK_ROWS = 65_536
"""The largest number of rows in a block: readers refuse blocks that claim more."""

SMALL_ROWS = 512
"""Up to so many rows, a block is stored as it is: to make it shorter takes longer than to write it."""

DICTIONARY_COLUMNS = frozenset({"events.address", "events.bytes", "events.reserved", "start.bytes"})
"""Columns whose values are wide but repeat often: an index into a list of distinct values is shorter."""

DELTA_COLUMNS = frozenset({"start_ns", "end_ns", "time_ns"})
"""Columns that rarely decrease, in any table."""

Column = npt.NDArray[Any]
Words = npt.NDArray[np.uint64]


def encode(name: str, block: Column) -> tuple[Chunk, bytes]:
    """Encode a block: return the chunk that describes it and its bytes, not yet compressed.

    Args:
        name: the column as `table.column`; it determines the encoding.
        block: shape (n,), n from 1 to `BLOCK_ROWS`, any integer dtype of at most 8 bytes.
    """
    if block[-1] == block[0] and (block == block[0]).all():
        return Chunk(rows=len(block), encoding=CONSTANT, base=int(block[0]) & _MASK), b""
    if len(block) <= SMALL_ROWS:
        chunk = Chunk(rows=len(block), encoding=OFFSET, width=block.dtype.itemsize)
        return chunk, _planes(block, chunk.width)
    low, high = int(block.min()), int(block.max())
    chunk = Chunk(rows=len(block), base=low & _MASK)
    # Modulo 2**64: sums and differences wrap around consistently.
    words = block.astype(np.int64 if block.dtype.kind == "i" else np.uint64).view(np.uint64)
    if name.rpartition(".")[2] in DELTA_COLUMNS:
        chunk.encoding = DELTA
        return chunk, _differences(chunk, words)
    if name in DICTIONARY_COLUMNS:
        return _dictionary(chunk, words)
    chunk.encoding, chunk.width = OFFSET, _width(high - low)
    return chunk, _planes(words - np.uint64(low & _MASK), chunk.width)


def decode(chunk: Chunk, raw: bytes, dtype: np.dtype[Any]) -> Column:
    """Return the block that `encode` received: shape (chunk.rows,).

    Raises:
        ValueError: the bytes do not match the chunk.
    """
    if len(raw) != expected_size(chunk):
        raise ValueError(f"a chunk holds {len(raw)} bytes where it should hold {expected_size(chunk)}")
    if chunk.encoding == CONSTANT:
        same: Column = np.full(chunk.rows, chunk.base, np.uint64).astype(dtype)
        return same
    if chunk.encoding == DELTA:
        summed: Column = _sums(chunk, _numbers(raw, chunk.rows - 1, chunk.width)).astype(dtype)
        return summed
    if chunk.encoding == DICTIONARY:
        cut = 8 * (chunk.values - 1)
        values = _sums(chunk, _numbers(raw[:cut], chunk.values - 1, 8)).astype(dtype)
        indices = _numbers(raw[cut:], chunk.rows, chunk.width)
        if int(indices.max()) >= len(values):
            raise ValueError("a chunk points behind the end of its values")
        block: Column = values.take(indices)
        return block
    narrow: Column = _numbers(raw, chunk.rows, chunk.width).astype(dtype)
    narrow += np.array(chunk.base, np.uint64).astype(dtype)  # sums wrap around
    return narrow


def expected_size(chunk: Chunk) -> int:
    """Return the uncompressed size of a chunk in bytes, computed from its description.

    Raises:
        ValueError: the description is invalid.
    """
    if not 1 <= chunk.rows <= BLOCK_ROWS or chunk.values > chunk.rows:
        raise ValueError(f"a chunk claims {chunk.rows} rows and {chunk.values} values")
    if chunk.encoding == CONSTANT:
        return 0
    if chunk.width not in (1, 2, 4, 8):
        raise ValueError(f"a chunk claims numbers of {chunk.width} bytes")
    if chunk.encoding == OFFSET:
        return chunk.rows * chunk.width
    if chunk.encoding == DELTA:
        return (chunk.rows - 1) * chunk.width
    if chunk.encoding == DICTIONARY and chunk.values:
        return (chunk.values - 1) * 8 + chunk.rows * chunk.width
    raise ValueError(f"a chunk has the unknown encoding {chunk.encoding}")


_MASK = (1 << 64) - 1


def _dictionary(chunk: Chunk, words: Words) -> tuple[Chunk, bytes]:
    order = address_order(words)
    ordered = words[order]
    new = np.empty(len(words), bool)
    new[0] = True
    np.not_equal(ordered[1:], ordered[:-1], out=new[1:])
    values = ordered[new]
    indices = np.empty(len(words), np.uint64)
    indices[order] = np.cumsum(new) - 1
    chunk.encoding, chunk.values = DICTIONARY, len(values)
    described = _differences(chunk, values, width=8)
    chunk.width = _width(len(values) - 1)
    return chunk, described + _planes(indices, chunk.width)


def _differences(chunk: Chunk, words: Words, width: int = 0) -> bytes:
    steps = np.diff(words)
    low = steps.view(np.int64).min() if len(steps) else np.int64(0)
    chunk.first, chunk.base = int(words[0]), int(low) & _MASK
    steps -= np.uint64(chunk.base)
    chunk.width = width or _width(int(steps.max()) if len(steps) else 0)
    return _planes(steps, chunk.width)


def _sums(chunk: Chunk, steps: Column) -> Words:
    words = np.empty(len(steps) + 1, np.uint64)
    words[0] = chunk.first
    np.add(steps, np.uint64(chunk.base), out=words[1:], casting="unsafe")
    return np.cumsum(words, out=words)


def _width(highest: int) -> int:
    """Return how many bytes a number up to `highest` needs: 1, 2, 4 or 8."""
    return next(width for width in (1, 2, 4, 8) if highest >> (8 * width) == 0)


def _planes(words: Column, width: int) -> bytes:
    """Return all lowest bytes, then all second-lowest bytes, and so on: similar bytes compress better."""
    narrow = words.astype(f"<u{width}")
    return bytes(narrow.view(np.uint8).reshape(-1, width).T.tobytes())


def _numbers(raw: bytes, count: int, width: int) -> Column:
    planes = np.frombuffer(raw, np.uint8).reshape(width, count)
    numbers: Column = planes[0].astype(f"<u{width}")
    for byte in range(1, width):  # several times faster than a transposed copy
        higher = planes[byte].astype(numbers.dtype)
        higher <<= 8 * byte
        numbers |= higher
    return numbers
