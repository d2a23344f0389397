"""What the tensor in each block is: by the operator that made it, or by those that use it later."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch

from tb_memplugin.record.torch_private.tensors import dtype_of, shape_of, strides_of
from tb_memplugin.trace import Allocations, TensorMetadata
from tb_memplugin.trace.replay import blocks_at
from tb_memplugin.trace.tables import Int32, Int64

if TYPE_CHECKING:
    from tb_memplugin.record.storages import Sighting

Dense = tuple[torch.dtype, Sequence[int], Sequence[int]]
"""A strided tensor's dtype, shape and strides as torch has them: reading them takes 0.2 microseconds."""

Seen = tuple[int, int, TensorMetadata]
"""A tensor that was in use: (epoch nanoseconds, address of its storage, what it is)."""


def dense(tensor: torch.Tensor) -> Dense | None:
    """Return dtype, shape and strides of a tensor, None if it has no such shape (nested, sparse)."""
    try:
        return dtype_of(tensor), shape_of(tensor), strides_of(tensor)
    except (RuntimeError, NotImplementedError):
        return None


def metadata_of(tensor: Dense) -> TensorMetadata:
    """Return what a tensor is, in a form that a trace has."""
    dtype, shape, strides = tensor
    return _metadata(dtype, tuple(shape), tuple(strides))


@lru_cache(4096)
def _metadata(dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...]) -> TensorMetadata:
    """Return equal ones as one object: a program has thousands of tensors of a few shapes."""
    return TensorMetadata(str(dtype).removeprefix("torch."), shape, strides)


def seen_in(sightings: Iterable[Sighting]) -> Iterator[Seen]:
    """Yield the tensors of sightings."""
    for sighting in sightings:
        if sighting.tensor is not None:
            yield sighting.time_ns, sighting.address, sighting.tensor


def seen_tensors(
    tensors: Iterable[Seen], blocks: Allocations, time_ns: Int64
) -> tuple[Int32, tuple[TensorMetadata, ...]]:
    """Return the tensor in each block, of those that were seen at its address while it lived.

    A block may hold several views. The tensor is the one with most bytes of those that fit, which is the
    whole block where one has its size; of equal ones it is the first.

    Args:
        tensors: those that were seen; the first of equal ones counts.

    Returns:
        Rows of a table of distinct tensors, -1 where none is known: int32, shape (blocks,); and the table.
    """
    rows: dict[TensorMetadata, int] = {}
    by_id: dict[int, tuple[int, TensorMetadata]] = {}  # by id: to hash a tensor's shape takes long
    uses = []
    for when, where, seen_tensor in tensors:
        entry = by_id.get(id(seen_tensor))
        if entry is None:
            entry = by_id[id(seen_tensor)] = rows.setdefault(seen_tensor, len(rows)), seen_tensor
        uses.append((when, where, entry[0]))
    time = np.array([use[0] for use in uses], np.int64)
    address = np.array([use[1] for use in uses], np.uint64)
    row = np.array([use[2] for use in uses], np.int64)
    block = blocks_at(address, np.searchsorted(time_ns, time, side="right") - 1, blocks)
    size = _bytes_of(list(rows))[row]
    fits = np.flatnonzero((block >= 0) & (size <= np.append(blocks.bytes, 0)[block]))
    fits = fits[np.lexsort((-size[fits], block[fits]))]
    with_tensor, first = np.unique(block[fits], return_index=True)
    used, number = np.unique(row[fits[first]], return_inverse=True)
    tensor = np.full(len(blocks), -1, np.int32)
    tensor[with_tensor] = number
    table = list(rows)
    return tensor, tuple(table[index] for index in used.tolist())


def made_tensors(tensors: Sequence[Dense | None], size: Int64) -> tuple[Int32, tuple[TensorMetadata, ...]]:
    """Return the tensor in each block, as `seen_tensors` does, of those that operators returned in them.

    Args:
        tensors: one per block, None where none is known.
        size: bytes of each block, shape (blocks,).
    """
    rows: dict[TensorMetadata, int] = {}
    tensor = np.array(
        [-1 if each is None else rows.setdefault(metadata_of(each), len(rows)) for each in tensors], np.int32
    )
    fits = np.append(_bytes_of(list(rows)), 0)[tensor] <= size
    return np.where(fits, tensor, -1).astype(np.int32), tuple(rows)


def _bytes_of(tensors: Sequence[TensorMetadata]) -> Int64:
    """Return how many bytes the elements of each tensor are; an element that repeats counts each time."""
    sizes = [float(math.prod(tensor.shape) * _itemsize(tensor.dtype)) for tensor in tensors]
    return np.minimum(np.array(sizes, np.float64), 1 << 62).astype(np.int64)


def _itemsize(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)
