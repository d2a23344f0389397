"""Bound how much of a peak is there only because a dispatch mode is on.

While any mode is on, torch does not write over tensors in backward, and computes some formulas in another
way (`isTensorSubclassLike` in torch's C++ code is then true for every tensor). The lists below come from
running every operator of torch's own test database forward and backward, alone and under a mode that does
nothing, with a counter in front of the allocator (torch 2.13.0, CPU).
"""

from __future__ import annotations

from typing import Any

import torch

from tb_memplugin.record.storage_lifetimes import Block
from tb_memplugin.record.torch_private.dispatch import schema_of
from tb_memplugin.record.torch_private.tensors import storage_key
from tb_memplugin.record.tracer.kernels import Counted
from tb_memplugin.record.tracer.layers import Layers, ThreadLayers

_Tensor, _strided = torch.Tensor, torch.strided

_IN_PLACE_ALONE = frozenset(
    f"aten::{name}"
    for name in (
        "add", "sub", "index_add", "index_fill", "index_put", "logical_and", "masked_fill", "masked_scatter",
        "put", "scatter", "scatter_add",
    )
)  # fmt: skip
"""Operators that autograd and derivative formulas run in place when no mode is on."""

_OTHER_FORMULAS = frozenset(
    f"{name}Backward{number}"
    for name, numbers in (
        ("BinaryCrossEntropy", "0"),
        ("BinaryCrossEntropyWithLogits", "0"),
        ("Clamp", "0"),
        ("Cumprod", "0"),
        ("Max", "1"),
        ("Median", "0"),
        ("Min", "1"),
        ("Nanmedian", "0"),
        ("Prod", "01"),
    )
    for number in numbers
)
"""Autograd nodes that compute several tensors in another way while a mode is on."""

_MORE_ALONE = frozenset(("MaxBackward1", "MedianBackward0", "MinBackward1", "NanmedianBackward0"))
"""Nodes that may take more without a mode, by less than their result: max() and others of a whole tensor."""


class ModeEffects:
    """Notes the peaks of one thread, reached in backward, that would be lower without a mode.

    Args:
        layers: the layers whose peaks are noted.
        here: those of the thread.

    Attributes:
        args: the arguments of the operator that has just run.
    """

    def __init__(self, layers: Layers, here: ThreadLayers) -> None:
        self._layers, self._here = layers, here
        self.args: tuple[Any, ...] = ()
        self._overwritten: tuple[Block, int, int] | None = None

    def note(self, operator: Any, out: Any, row: int, counted: Counted) -> None:
        """Note the peak that an operator has just reached in backward, on the device or in a layer (row)."""
        node = self._here.node_name
        if node in _MORE_ALONE:
            self._note_more(out, counted)
        if counted.top < self._layers.ledger.peak and counted.top < self._peak_of(row):
            return
        if node in _OTHER_FORMULAS:
            self._reached(counted.top, row, counted.top - self._here.node_level)
        elif isinstance(out, _Tensor) and out.layout is torch.sparse_coo:
            self._reached(counted.top, row, counted.bytes)  # autograd's copy of a sparse gradient
        else:
            self._overwritten = self._perhaps_overwritten(operator, out, row, counted)

    def settle(self) -> None:
        """Note the last peak if the input of its operator was freed before the next operator."""
        if self._overwritten is not None:
            (block, top, row), self._overwritten = self._overwritten, None
            if block() is None:
                self._reached(top, row, block.bytes)

    def _perhaps_overwritten(
        self, operator: Any, out: Any, row: int, counted: Counted
    ) -> tuple[Block, int, int] | None:
        """Return (block, peak, row) of an input that torch may write over when no mode is on."""
        schema, args = schema_of(operator), self.args
        if schema is None or schema.name not in _IN_PLACE_ALONE or not args:
            return None
        if not (type(args[0]) is type(out) is _Tensor and args[0].layout is out.layout is _strided):
            return None
        blocks = self._layers.ledger.blocks
        block, result = (blocks.get(storage_key(tensor.untyped_storage())) for tensor in (args[0], out))
        if (
            isinstance(block, Block)
            and result is not None
            and result is not block
            and result.bytes == block.bytes
        ):
            return block, counted.top, row
        return None

    def _note_more(self, out: Any, counted: Counted) -> None:
        here, unseen = self._here, self._layers.unseen
        here.node_peak = max(here.node_peak, counted.top)
        if isinstance(out, _Tensor):
            unseen.higher_peak = max(unseen.higher_peak, here.node_peak + out.nbytes)

    def _peak_of(self, row: int) -> int:
        return self._layers.figures[row].peak if row >= 0 else 1 << 62

    def _reached(self, top: int, row: int, excess: int) -> None:
        if top == self._layers.ledger.peak:
            self._layers.unseen.excess = top, excess
        if row >= 0 and top == self._layers.figures[row].peak:
            self._layers.figures[row].excess = top, excess
