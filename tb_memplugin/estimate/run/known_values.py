"""Values of small tensors that follow from the program's own numbers and data, on any device.

Fake tensors lose their values. FakeTensorMode keeps those of small tensors on the CPU
(`FakeTensor.constant`). Here the GPU's keep them, too, as long as every input of an operator is known:
lengths, masks, labels of a batch, counters. What follows from parameters or random numbers stays unknown.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_map

aten = torch.ops.aten

MOST = 1 << 20
"""The most elements of a tensor that keeps its values."""

_FEW = 1 << 16
"""Elements that operators may read without a look at how many they make."""

_CPU, _META = torch.device("cpu"), torch.device("meta")
_KNOWN = "known_values"
"""The attribute of a fake tensor that holds its values."""


_SHUFFLED = "shuffled_values"
"""The attribute that holds its values in another order, with the tensor's version at that time."""


_DOMINATED = {
    aten.bitwise_and.Tensor: False,
    aten.logical_and.default: False,
    aten.bitwise_or.Tensor: True,
    aten.logical_or.default: True,
}
"""Operators whose result is known if one input has this value everywhere, whatever the other has."""


_OF_VALUES = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
"""Tags of operators whose shapes or results depend on values, of which FakeTensorMode computes none."""


class UnknownValuesError(Exception):
    """A tensor's values are not known."""


class KnownValues:
    """The values of a fake run's tensors. Views of one storage share them, as views do."""

    def __init__(self) -> None:
        self._tensors: dict[StorageWeakRef, list[weakref.ref[FakeTensor]]] = {}

    def keep(self, fake: Any, real: Any) -> None:
        """Keep the values of an operator's real results for its fake ones, where these are small."""
        for tensor, values in zip(_leaves(fake), _leaves(real), strict=False):
            if type(tensor) is not FakeTensor or tensor.shape != values.shape or values.numel() > MOST:
                continue
            if values.layout is not torch.strided:
                continue
            if tensor.fake_device == _CPU:
                if tensor.constant is None:
                    tensor.constant = values
                    tensor.fake_mode.fake_tensor_converter.add_constant_storage_mapping(tensor)
            else:
                setattr(tensor, _KNOWN, values)
                storage = StorageWeakRef(values.untyped_storage())
                self._tensors.setdefault(storage, []).append(weakref.ref(tensor))

    def result(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the real result of an operator, computed on the CPU.

        What it writes is written to the known values, too, or makes them unknown.

        Raises:
            UnknownValuesError: an input is not known, the operator draws random numbers, or FakeTensorMode
                keeps the values itself.
        """
        if func.overloadpacket is aten.sort and (values := _shuffled(args[0])) is not None:
            with no_dispatch():
                return func(values, *args[1:], **kwargs)[0]
        tensors = list(_tensors((*args, *kwargs.values())))
        with_values = [tensor for tensor in tensors if values_of(tensor) is not None]
        if not with_values:
            raise UnknownValuesError
        if len(with_values) == 1 and len(tensors) == 2 and func in _DOMINATED:
            return _dominated(with_values[0], tensors, by=_DOMINATED[func])
        if len(with_values) < len(tensors) or torch.Tag.nondeterministic_seeded in func.tags:
            if func._schema.is_mutable:
                self._forget_written(func, args, kwargs)
            raise UnknownValuesError
        constants = all(type(tensor) is FakeTensor and tensor.fake_device == _CPU for tensor in tensors)
        constants = constants and not any(
            isinstance(each, torch.device) for each in (*args, *kwargs.values())
        )
        if constants and _OF_VALUES.isdisjoint(func.tags):
            raise UnknownValuesError
        if sum(tensor.numel() for tensor in tensors) > _FEW and _makes_many(func, args, kwargs):
            raise UnknownValuesError
        try:
            with no_dispatch():
                return func(*tree_map(_real, tuple(args)), **tree_map(_real, dict(kwargs)))
        except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError) as error:
            raise UnknownValuesError from error

    def _forget_written(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            written = args[position] if position < len(args) else kwargs.get(argument.name)
            for tensor in _tensors((written,)):
                values = vars(tensor).get(_KNOWN) if type(tensor) is FakeTensor else None
                if values is not None:
                    for reference in self._tensors.pop(StorageWeakRef(values.untyped_storage()), ()):
                        if (alias := reference()) is not None:
                            setattr(alias, _KNOWN, None)


def forget(tensor: FakeTensor) -> None:
    """Make the values of a tensor unknown, whose data are others now."""
    tensor.constant = None
    setattr(tensor, _KNOWN, None)


def values_of(tensor: Any) -> torch.Tensor | None:
    """Return the values of a small tensor, on the CPU; None if they are not known."""
    if type(tensor) is FakeTensor:
        values: torch.Tensor | None = vars(tensor).get(_KNOWN)
        return tensor.constant if values is None else values
    return tensor if type(tensor) is torch.Tensor and tensor.numel() <= MOST else None


def shuffle(tensor: torch.Tensor, values: torch.Tensor | None) -> None:
    """Keep the values of a row of which the order is not known; sorted, they are known."""
    if not tensor.is_inference():  # which has no version
        setattr(tensor, _SHUFFLED, (values, tensor._version))


def _shuffled(tensor: Any) -> torch.Tensor | None:
    values, version = vars(tensor).get(_SHUFFLED, (None, 0))
    return values if values is not None and tensor._version == version else None


def _dominated(deciding: Any, tensors: Sequence[Any], *, by: bool) -> torch.Tensor:
    """Return the result of an operator that one input decides alone.

    Raises:
        UnknownValuesError: it does not.
    """
    values = values_of(deciding)
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors))
    if values is None or values.dtype is not torch.bool or math.prod(shape) > MOST:
        raise UnknownValuesError
    with no_dispatch():
        if bool((values == by).all()):
            return torch.full(shape, by)
    raise UnknownValuesError


def _makes_many(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether results, as of the distances of all points, are too large to be computed for their values."""
    try:
        with no_dispatch():
            out = func(*tree_map(_shape, tuple(args)), **tree_map(_shape, dict(kwargs)))
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError):
        return False  # of values, like `nonzero`, whose results are no larger than what they read
    return any(tensor.numel() > MOST for tensor in _tensors((out,)))


def _shape(argument: Any) -> Any:
    if isinstance(real := _real(argument), torch.Tensor):
        return torch.empty_like(real, device=_META)
    return _META if isinstance(argument, torch.device) else argument


def _real(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return values_of(argument)
    return _CPU if isinstance(argument, torch.device) else argument


def _tensors(arguments: Sequence[Any]) -> Iterator[Any]:
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif type(argument) in (list, tuple):
            yield from _tensors(argument)


def _leaves(result: Any) -> Iterator[Any]:
    if isinstance(result, list | tuple):
        for each in result:
            yield from _leaves(each)
    else:
        yield result
