"""`pack_padded_sequence` and back: there are as many rows as the sum of the lengths, which are values.

Lengths that the program makes of its own numbers are known (constants.py). Others are refused by name.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.corrections.constants import constant
from tb_memplugin.estimate.corrections.correction import Correction
from tb_memplugin.estimate.fake_mode import CountingFakeMode, Rule
from tb_memplugin.estimate.patches import Patches

aten = torch.ops.aten


class PackedSequences(Correction):
    """Results as large as the real ones (aten/src/ATen/native/PackedSequence.cpp)."""

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Unpacking and the derivative of packing are no operators, but C++ that reads the sizes."""

        def unpack(
            data: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, padding: float, total: int
        ) -> Any:
            sizes = values_of(batch_sizes)
            padded = _unpacked(data, sizes, padding, max(total, len(sizes)))
            lengths = [sum(size > row for size in sizes) for row in range(sizes[0])]
            return (padded.transpose(0, 1) if batch_first else padded), _whole(mode, lengths)

        library = torch.library.Library("aten", "IMPL")
        patches.on_undo(library._destroy)
        key = f"Autograd{self.target.device_type.upper()}"
        library.impl("_pad_packed_sequence", unpack, key)
        library.impl("_pack_padded_sequence_backward", _pack_backward, key)

    def rules(self) -> dict[Any, Rule]:
        """To pack."""
        return {aten._pack_padded_sequence.default: _pack}


def values_of(tensor: torch.Tensor) -> list[int]:
    """Lengths, or how many sequences there are at each time.

    Raises:
        MemPluginError: they are not known.
    """
    real: torch.Tensor | None = getattr(tensor, "constant", None)
    if real is None:
        raise MemPluginError(
            "Sequences are packed (pack_padded_sequence) by lengths that are values: fake tensors have none.",
            where="torch.nn.utils.rnn.pack_padded_sequence",
            fix="Give the lengths as Python numbers, or estimate with padded sequences: the memory of the "
            "longest batch.",
        )
    return [int(one) for one in real.tolist()]


def _pack(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    data, lengths, _ = args
    known = values_of(lengths)
    sizes = [sum(length > time for length in known) for time in range(max(known))]
    with mode:
        rows = data.new_empty(sum(known), *data.shape[2:])
    return rows, _whole(mode, sizes)


def _pack_backward(
    gradient: torch.Tensor, shape: Sequence[int], batch_sizes: torch.Tensor, batch_first: bool
) -> torch.Tensor:
    """Zeros as large as what was packed, into which the rows are written."""
    return gradient.new_zeros(shape)


def _unpacked(data: torch.Tensor, sizes: list[int], padding: float, times: int) -> torch.Tensor:
    """Rows written where they belong, a stretch of equal sizes at once."""
    padded = data.new_full((times, sizes[0], *data.shape[1:]), padding)
    row = time = 0
    for size, stretch in itertools.groupby(sizes):
        length = len(list(stretch))
        rows = data[row : row + size * length].view(length, size, *data.shape[1:])
        padded[time : time + length, :size].copy_(rows)
        row, time = row + size * length, time + length
    return padded


def _whole(mode: CountingFakeMode, numbers: list[int]) -> torch.Tensor:
    """A constant of whole numbers on the CPU."""
    with _disable_current_modes():
        real = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    return constant(mode, real)
