"""The tensors that operators received, which a profile with `record_shapes=True` contains."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from tb_memplugin.record.tensor_metadata import Seen, metadata_of
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
from tb_memplugin.trace import TensorMetadata

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
