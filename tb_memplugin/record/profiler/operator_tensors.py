"""The tensors that operators received, which a profile with `record_shapes=True` contains."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from tb_memplugin.record.tensor_metadata import Seen
from tb_memplugin.record.torch_private.profiler import (
    Event,
    OperatorFields,
    TensorFields,
    event_children,
    event_correlation,
    event_fields,
    event_start,
    operator_inputs,
    tensor_address,
    tensor_allocation,
    tensor_dtype,
    tensor_shape,
    tensor_strides,
)
from tb_memplugin.trace import TensorMetadata


def operator_tensors(roots: Iterable[Event]) -> list[Seen]:
    """Return the tensors that operators received, by time, each once for every allocation that holds it.

    A tensor is known from the first operator that uses it: what an operator returns is the input of others.

    Args:
        roots: `prof.profiler.kineto_results.experimental_event_tree()`.
    """
    first: dict[tuple[int, int, TensorMetadata], int] = {}
    names: dict[Any, str] = {}
    pending = list(roots)
    while pending:
        event = pending.pop()
        pending += event_children(event)
        if not event_correlation(event) or type(fields := event_fields(event)) is not OperatorFields:
            continue
        start = event_start(event)
        for tensor in _tensors(operator_inputs(fields)):
            address = tensor_address(tensor)
            if not address:
                continue
            dtype = tensor_dtype(tensor)
            name = names.get(dtype) or names.setdefault(dtype, str(dtype).removeprefix("torch."))
            metadata = TensorMetadata(name, tuple(tensor_shape(tensor)), tuple(tensor_strides(tensor)))
            number: int | None = tensor_allocation(tensor)
            key = (start if number is None else number, address, metadata)
            first[key] = min(start, first.get(key, start))
    return sorted((start, address, metadata) for (_, address, metadata), start in first.items())


def _tensors(inputs: Iterable[Any]) -> Iterator[Any]:
    for value in inputs:
        if type(value) is TensorFields:
            yield value
        elif type(value) is list:
            yield from _tensors(value)
