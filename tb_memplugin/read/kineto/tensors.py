"""Find dtype and shape of allocations in a Kineto trace, from what was given to the operators that made them.

A trace recorded with `record_shapes=True` has no addresses of inputs, so a later operator does not tell what
an allocation holds. But for many operators the inputs decide what they return.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from tb_memplugin.read.kineto.events import MemoryRows, Written
from tb_memplugin.read.kineto.ranges import Ranges, innermost
from tb_memplugin.trace import TensorMetadata
from tb_memplugin.trace.tables import Bool, Int32, Int64

_NAMES = {
    "float": ("float32", 4),
    "double": ("float64", 8),
    "c10::Half": ("float16", 2),
    "c10::BFloat16": ("bfloat16", 2),
    "bool": ("bool", 1),
    "unsigned char": ("uint8", 1),
    "signed char": ("int8", 1),
    "short": ("int16", 2),
    "int": ("int32", 4),
    "long int": ("int64", 8),
    "long": ("int64", 8),
    "c10::complex<float>": ("complex64", 8),
    "c10::complex<double>": ("complex128", 16),
}
"""The dtype, and bytes of an element, by the C++ type in "Input type" (`typeMetaToScalarType`)."""

_FLOATING = ("float32", "float64", "float16", "bfloat16")
_BYTES = dict(_NAMES.values())
_NUMBERS = {
    "0": "uint8",
    "1": "int8",
    "2": "int16",
    "3": "int32",
    "4": "int64",
    "5": "float16",
    "6": "float32",
    "7": "float64",
    "9": "complex64",
    "10": "complex128",
    "11": "bool",
    "15": "bfloat16",
}
"""The dtype by its number in c10/core/ScalarType.h."""

_LIST = re.compile(r"\[(\d{1,15}(, \d{1,15})*)?\]")
LONGEST_LIST = 400
MOST_DIMENSIONS = 64
ROUNDED_TO, MOST_REMAINDER = 512, 1 << 20
"""A caching allocator rounds to this, and may leave so much at the end of a block of 1 MiB or more."""


@dataclass(frozen=True)
class Inputs:
    """What an operator was given: numbers and lists as texts, and dtype, shape and strides of its tensors."""

    arguments: Written

    @cached_property
    def texts(self) -> list[Any]:
        """The values that are no tensors, as texts."""
        return _list(self.arguments.get("Concrete Inputs"))

    @cached_property
    def tensors(self) -> list[TensorMetadata]:
        """The tensors. There are none if dtypes, shapes or strides are not recorded."""
        columns = (_list(self.arguments.get(f"Input {key}")) for key in ("type", "Dims", "Strides"))
        kinds, shapes, strides = columns
        if not len(kinds) == len(shapes) == len(strides):
            return []
        return [
            TensorMetadata(_NAMES[kind][0], tuple(shape), tuple(steps))
            for kind, shape, steps in zip(kinds, shapes, strides, strict=True)
            if type(kind) is str and kind in _NAMES and _is_shape(shape) and _is_shape(steps)
        ]


def _list(value: object) -> list[Any]:
    return value if type(value) is list else []


def _is_shape(value: object) -> bool:
    return (
        type(value) is list
        and len(value) <= MOST_DIMENSIONS
        and all(type(size) is int and 0 <= size < 1 << 50 for size in value)
    )


def _numbers(text: object) -> tuple[int, ...] | None:
    """Return the list of numbers in a text."""
    if type(text) is not str or len(text) > LONGEST_LIST or not _LIST.fullmatch(text):
        return None
    return tuple(map(int, re.findall(r"\d+", text)))


def _dense(dtype: str, shape: Sequence[int]) -> TensorMetadata:
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return TensorMetadata(dtype, tuple(shape), tuple(strides))


def _empty(inputs: Inputs, size: int) -> TensorMetadata | None:
    """aten::empty(size, dtype, layout, device, pin_memory, memory_format)."""
    shape = _numbers(inputs.texts[0])
    if shape is None or inputs.texts[5] not in ("", "0"):
        return None
    return _dense(_dtype(inputs.texts[1], size, shape), shape)


def _empty_strided(inputs: Inputs, size: int) -> TensorMetadata | None:
    """aten::empty_strided(size, stride, dtype, ...)."""
    shape, strides = _numbers(inputs.texts[0]), _numbers(inputs.texts[1])
    if shape is None or strides is None or len(shape) != len(strides):
        return None
    return TensorMetadata(_dtype(inputs.texts[2], size, shape), shape, strides)


def _dtype(text: object, size: int, shape: Sequence[int]) -> str:
    """Return the dtype of a number; if it is the default, it is floating: that of so many bytes."""
    if text == "":
        return "float64" if prod(shape) * 8 == size else "float32"
    return _NUMBERS.get(text, "") if type(text) is str else ""


def _product(inputs: Inputs, _: int) -> TensorMetadata | None:
    """aten::mm, bmm and, with what is added first, addmm, baddbmm."""
    left, right = inputs.tensors[-2:]
    if left.dtype != right.dtype or len(left.shape) != len(right.shape) or len(left.shape) < 2:
        return None
    return _dense(left.dtype, (*left.shape[:-1], right.shape[-1]))


def _elementwise(inputs: Inputs, _: int) -> TensorMetadata | None:
    """Operators on each element. Strides are kept where all tensors of the full shape have the same."""
    tensors = [tensor for tensor in inputs.tensors if tensor.shape]
    (dtype,) = {tensor.dtype for tensor in tensors}
    shape = np.broadcast_shapes(*(tensor.shape for tensor in tensors))
    (full,) = {tensor for tensor in tensors if tensor.shape == shape}
    is_dense = full.is_contiguous or _span(full) == prod(shape)
    return full if dtype in _FLOATING and is_dense else None


def _span(tensor: TensorMetadata) -> int:
    """Return the number of elements from the first to the last."""
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.strides, strict=True))


_ELEMENTWISE = (
    *("add", "sub", "mul", "div", "pow", "sqrt", "rsqrt", "exp", "log", "neg", "abs", "tanh", "sigmoid"),
    *("relu", "gelu", "silu", "softplus", "leaky_relu", "elu", "mish", "hardswish", "addcmul", "addcdiv"),
    *("_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data"),
    *("tanh_backward", "sigmoid_backward", "threshold_backward", "gelu_backward", "silu_backward"),
)
_RULES: dict[str, Callable[[Inputs, int], TensorMetadata | None]] = {
    "aten::empty": _empty,
    "aten::empty_strided": _empty_strided,
    **dict.fromkeys(("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm"), _product),
    **dict.fromkeys((f"aten::{name}" for name in _ELEMENTWISE), _elementwise),
}
"""What operators return, by the name of the operator that allocates, not of one that calls it."""


def tensors_of(
    ranges: Ranges, around: Int64, memory: MemoryRows, in_blocks: Bool
) -> tuple[Int32, tuple[TensorMetadata, ...]]:
    """Return the row of each memory row's tensor, -1 where it is not sure, and the tensors, each once.

    Args:
        around: the innermost range around each memory row, -1 for none.
        memory: the memory rows. A tensor counts only if its bytes are those that were allocated.
        in_blocks: mask of devices whose sizes are those of whole (rounded) blocks.
    """
    row_of = np.full(len(memory.bytes), -1, np.int32)
    tensors: dict[TensorMetadata, int] = {}
    operator = np.append(innermost(ranges.parent, ranges.operator), -1)[around]
    has_rule = np.array([*(name in _RULES for name in ranges.name), False], bool)
    for row in np.flatnonzero(has_rule[operator] & (memory.bytes > 0)).tolist():
        size, in_block = int(memory.bytes[row]), bool(in_blocks[memory.device[row]])
        tensor = _returned(ranges, int(operator[row]), size)
        if tensor is not None and _fits(tensor, size, in_block):
            row_of[row] = tensors.setdefault(tensor, len(tensors))
    return row_of, tuple(tensors)


def _returned(ranges: Ranges, operator: int, size: int) -> TensorMetadata | None:
    try:
        return _RULES[ranges.name[operator]](Inputs(ranges.inputs[operator]), size)
    except (IndexError, ValueError):  # other inputs than those of the operator that the rule is about
        return None


def _fits(tensor: TensorMetadata, size: int, in_block: bool) -> bool:
    """Whether a tensor takes the bytes that were allocated."""
    if tensor.dtype not in _BYTES or 0 in tensor.shape:
        return False
    needed = _span(tensor) * _BYTES[tensor.dtype]
    if not in_block:
        return needed == size
    most = MOST_REMAINDER if size >= MOST_REMAINDER else ROUNDED_TO
    return 0 <= size - needed < most
