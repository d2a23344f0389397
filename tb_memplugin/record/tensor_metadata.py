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
import sys
from typing import Any

from tb_memplugin.record.torch_private.profiler import (
    Event,
    OperatorFields,
    TensorFields,
    event_fields,
    event_name,
    event_start,
    operator_inputs,
    tensor_address,
    tensor_allocation,
    tensor_dtype,
    tensor_shape,
    tensor_strides,
)

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


_PASSING_ON = frozenset(
    f"aten::{name}"
    for name in (
        "as_strided", "clone", "detach", "empty", "empty_like", "empty_strided", "item", "layer_norm",
        "linear", "narrow", "reshape", "resolve_conj", "resolve_neg", "squeeze", "t", "to", "_to_copy",
        "unsafe_chunk", "_unsafe_view", "unsqueeze", "view", "zeros",
    )
) | {"detach"}  # fmt: skip
"""Operators that receive no tensor, or one that others received before or receive next, whole. They are half
of all, and reading what an operator received takes longer than anything else that is read of it."""

_OF_ENGINE = "autograd::engine::"
"""The beginning of the name of what is around a node of autograd. It has no tensors."""


class OperatorTensors:
    """The first tensor that an operator received of each allocation: what one returns is another's input.

    A view of a tensor is made by an operator that received the tensor, so the first is no view. Each is read
    at once: to keep torch's objects and read them later takes longer. Tuples or lists of tens of thousands of
    tensors would make the garbage collector search the whole program, so equal ones are one object.
    """

    def __init__(self) -> None:
        self._start: dict[int, int] = {}
        self._address: dict[int, int] = {}
        self._tensor: dict[int, TensorMetadata] = {}

    def see(self, event: Event) -> None:
        """Remember what an operator received. Other events have no tensors."""
        name = event_name(event)
        if name in _PASSING_ON or name.startswith(_OF_ENGINE):
            return
        fields = event_fields(event)
        if type(fields) is OperatorFields and (inputs := operator_inputs(fields)):
            self._see(inputs, event_start(event))

    def _see(self, inputs: Iterable[Any], start: int) -> None:
        starts = self._start
        for value in inputs:
            if type(value) is TensorFields:
                number = tensor_allocation(value)
                if start < starts.get(number, sys.maxsize) and (address := tensor_address(value)):
                    starts[number], self._address[number] = start, address
                    self._tensor[number] = metadata_of(
                        (tensor_dtype(value), tensor_shape(value), tensor_strides(value))
                    )
            elif type(value) is list:
                self._see(value, start)

    def tensors(self) -> Iterator[Seen]:
        """Yield the tensors, by time."""
        for number in sorted(self._start, key=self._start.__getitem__):
            yield self._start[number], self._address[number], self._tensor[number]
