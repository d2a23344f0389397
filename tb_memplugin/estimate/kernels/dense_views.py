"""Shape and strides of tensors as convolutions read them: which memory format they have, and its copies.

Sources: c10/core/MemoryFormat.h (is_channels_last_strides_2d), aten/src/ATen/native/ConvUtils.h
(cudnn_conv_suggest_memory_format), and aten/src/ATen/cudnn/Descriptors.h (fixSizeOneDimStride).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch


@dataclass(frozen=True, slots=True)
class View:
    """What a kernel sees of a tensor. Strides and offset count elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    offset: int = 0

    @classmethod
    def of(cls, tensor: torch.Tensor) -> View:
        """Return that of a tensor."""
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, int(tensor.storage_offset()))

    @property
    def bytes(self) -> int:
        """The bytes of the elements."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def alignment(self) -> int:
        """The largest power of two up to 32 that divides the address in bytes (Conv_v8.cpp)."""
        address = self.offset * self.dtype.itemsize
        return min(address & -address, 32) if address else 32

    @property
    def is_channels_last(self) -> bool:
        """Whether the strides are those of channels-last, which shapes of one element in a row leave open."""
        if len(self.shape) < 4 or self.strides[1] == 0:
            return False
        least = 0
        for axis in (1, *range(len(self.shape) - 1, 1, -1), 0):
            size, stride = self.shape[axis], self.strides[axis]
            if size == 0 or stride < least or (axis == 0 and least == self.strides[1]):
                return False
            least = stride * max(size, 1)
        return True

    def with_height(self) -> View:
        """Return a sequence as an image of one row."""
        (batch, channels, length), (far, middle, near) = self.shape, self.strides
        strides = (far, middle, near * length, near)
        return View((batch, channels, 1, length), strides, self.dtype, self.offset)

    def dense(self, channels_last: bool) -> View:
        """Return this view if it is contiguous in a memory format, else that of a copy in the format."""
        wanted = dense_strides(self.shape, channels_last)
        if not prod(self.shape) or all(
            size == 1 or stride == other
            for size, stride, other in zip(self.shape, self.strides, wanted, strict=True)
        ):
            return self
        return View(self.shape, wanted, self.dtype)

    def described_strides(self, channels_last: bool) -> tuple[int, ...]:
        """Return the strides as cuDNN is told: dimensions of one element get those of a dense tensor."""
        wanted = dense_strides(self.shape, channels_last)
        return tuple(
            other if size == 1 else stride
            for size, stride, other in zip(self.shape, self.strides, wanted, strict=True)
        )


def dense_strides(shape: tuple[int, ...], channels_last: bool) -> tuple[int, ...]:
    """Return the strides of a tensor without gaps; with `channels_last`, dimension 1 is the fastest."""
    last = len(shape) - 1
    order = (1, *range(last, 1, -1), 0) if channels_last else tuple(range(last, -1, -1))
    strides, step = [0] * len(shape), 1
    for axis in order:
        strides[axis] = step
        step *= shape[axis]
    return tuple(strides)


def reads_channels_last(first: View, second: View) -> bool:
    """Whether cuDNN reads a convolution's operands in channels-last: one has it, and neither is float64."""
    if torch.float64 in (first.dtype, second.dtype):
        return False
    return first.is_channels_last or second.is_channels_last
