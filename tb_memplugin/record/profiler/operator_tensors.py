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

_PASSING_ON = frozenset(
    f"aten::{name}"
    for name in (
        "as_strided", "detach", "empty", "empty_like", "empty_strided", "item", "layer_norm", "linear",
        "reshape", "resolve_conj", "resolve_neg", "squeeze", "to", "_to_copy", "_unsafe_view", "unsqueeze",
        "view",
    )
) | {"detach"}  # fmt: skip
"""Operators that receive no tensor, or one that others received before or receive next, whole. They are half
of all, and reading what an operator received takes longer than anything else that is read of it."""

_OF_ENGINE = "autograd::engine::"
"""The beginning of the name of what is around a node of autograd. It has no tensors."""


class OperatorTensors:
    """The first tensor that an operator received of each allocation: what one returns is another's input.

    A view of a tensor is made by an operator that received the tensor, so the first is no view. The tensors
    are kept as torch's own objects, which the garbage collector does not count: tuples and lists of tens of
    thousands of tensors would make it search the whole program, which takes longer than the walk.
    """

    def __init__(self) -> None:
        self._first: dict[int, Any] = {}
        self._start: dict[int, int] = {}

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
                if start < starts.get(number, sys.maxsize) and tensor_address(value):
                    self._first[number], starts[number] = value, start
            elif type(value) is list:
                self._see(value, start)

    def tensors(self) -> Iterator[Seen]:
        """Yield the tensors, by time."""
        for number in sorted(self._start, key=self._start.__getitem__):
            value = self._first[number]
            tensor = tensor_dtype(value), tensor_shape(value), tensor_strides(value)
            yield self._start[number], tensor_address(value), metadata_of(tensor)
