"""Pack and unpack padded sequences: the number of rows is the sum of the lengths, which are tensor values.

Lengths that follow from the program's own numbers and data are known. Others raise an error.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from tb_memplugin.estimate.kernels.recurrent import lengths_of
from tb_memplugin.estimate.program.constants import constant
from tb_memplugin.estimate.run.correction import Correction
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode, Rule
from tb_memplugin.estimate.run.patches import Patches
from tb_memplugin.record.torch_private.dispatch import without_modes

aten = torch.ops.aten


class PackedSequences(Correction):
    """Returns results of the real size (aten/src/ATen/native/PackedSequence.cpp)."""

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Replace unpacking and the derivative of packing, which are C++ functions that read the sizes."""

        def unpack(
            data: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, padding: float, total: int
        ) -> Any:
            sizes = lengths_of(batch_sizes)
            padded = _unpacked(data, sizes, padding, max(total, len(sizes)))
            lengths = [sum(size > row for size in sizes) for row in range(sizes[0])]
            return (padded.transpose(0, 1) if batch_first else padded), _integers(mode, lengths)

        key = f"Autograd{self.target.device_type.upper()}"
        patches.register("_pad_packed_sequence", unpack, key)
        patches.register("_pack_padded_sequence_backward", _pack_backward, key)

    def rules(self) -> dict[Any, Rule]:
        """Return the rule for packing."""
        return {aten._pack_padded_sequence.default: _pack}


def _pack(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    data, lengths, batch_first = args
    values = lengths_of(lengths)
    sizes = [sum(length > time for length in values) for time in range(max(values))]
    with mode.running(recorded=True):
        steps = data.transpose(0, 1) if batch_first else data
        pieces = [steps[first:last, :size].contiguous() for first, last, size in _stretches(sizes)]
        rows = torch.cat([piece.flatten(0, 1) for piece in pieces])
    return rows, _integers(mode, sizes)


def _pack_backward(
    gradient: torch.Tensor, shape: Sequence[int], batch_sizes: torch.Tensor, batch_first: bool
) -> torch.Tensor:
    """Return zeros of the shape that was packed, time first; the real function writes the rows into them."""
    if not batch_first:
        return gradient.new_zeros(shape)
    batch, times, *rest = shape
    return gradient.new_zeros((times, batch, *rest)).transpose(0, 1)


def _unpacked(data: torch.Tensor, sizes: list[int], padding: float, times: int) -> torch.Tensor:
    """Return the padded sequences."""
    padded = data.new_full((times, sizes[0], *data.shape[1:]), padding)
    row = 0
    for first, last, size in _stretches(sizes):
        rows = data[row : row + size * (last - first)].unflatten(0, (last - first, size))
        padded[first:last, :size].copy_(rows)
        row += size * (last - first)
    return padded


def _stretches(sizes: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield stretches of time steps with equal batch sizes, which are copied together, and these sizes."""
    first = 0
    for size, stretch in itertools.groupby(sizes):
        last = first + len(list(stretch))
        yield first, last, size
        first = last


def _integers(mode: CountingFakeMode, numbers: list[int]) -> torch.Tensor:
    """Return a constant int64 tensor on the CPU."""
    with without_modes():
        real = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    return constant(mode, real)
