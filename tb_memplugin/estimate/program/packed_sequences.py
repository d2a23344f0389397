"""Pack and unpack padded sequences: the number of rows is the sum of the lengths, which are tensor values.

Lengths that the program creates from its own numbers are known (constants.py). Others raise an error.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tb_memplugin.errors import MemPluginError
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
            sizes = values_of(batch_sizes)
            padded = _unpacked(data, sizes, padding, max(total, len(sizes)))
            lengths = [sum(size > row for size in sizes) for row in range(sizes[0])]
            return (padded.transpose(0, 1) if batch_first else padded), _integers(mode, lengths)

        key = f"Autograd{self.target.device_type.upper()}"
        patches.register("_pad_packed_sequence", unpack, key)
        patches.register("_pack_padded_sequence_backward", _pack_backward, key)

    def rules(self) -> dict[Any, Rule]:
        """Return the rule for packing."""
        return {aten._pack_padded_sequence.default: _pack}


def values_of(tensor: torch.Tensor) -> list[int]:
    """Return the values of a tensor of lengths, or of batch sizes at each time step.

    Raises:
        MemPluginError: the values are not known.
    """
    real: torch.Tensor | None = getattr(tensor, "constant", None)
    if real is None:
        raise MemPluginError(
            "pack_padded_sequence needs the values of the lengths, but fake tensors have no values.",
            where="torch.nn.utils.rnn.pack_padded_sequence",
            fix=(
                "Give the lengths as Python numbers, or use padded sequences, which estimates the memory "
                "of the longest batch."
            ),
        )
    return [int(value) for value in real.tolist()]


def _pack(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    data, lengths, _ = args
    values = values_of(lengths)
    sizes = [sum(length > time for length in values) for time in range(max(values))]
    with mode:
        rows = data.new_empty(sum(values), *data.shape[2:])
    return rows, _integers(mode, sizes)


def _pack_backward(
    gradient: torch.Tensor, shape: Sequence[int], batch_sizes: torch.Tensor, batch_first: bool
) -> torch.Tensor:
    """Return zeros of the shape that was packed; the real function writes the rows into them."""
    return gradient.new_zeros(shape)


def _unpacked(data: torch.Tensor, sizes: list[int], padding: float, times: int) -> torch.Tensor:
    """Return the padded sequences; time steps with equal batch sizes are copied together."""
    padded = data.new_full((times, sizes[0], *data.shape[1:]), padding)
    row = time = 0
    for size, stretch in itertools.groupby(sizes):
        length = len(list(stretch))
        rows = data[row : row + size * length].view(length, size, *data.shape[1:])
        padded[time : time + length, :size].copy_(rows)
        row, time = row + size * length, time + length
    return padded


def _integers(mode: CountingFakeMode, numbers: list[int]) -> torch.Tensor:
    """Return a constant int64 tensor on the CPU."""
    with without_modes():
        real = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    return constant(mode, real)
