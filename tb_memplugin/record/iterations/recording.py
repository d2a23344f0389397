"""The tracer's recording of storages, with exact categories for gradients and inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tb_memplugin.record.storage_lifetimes import Block, Buffer
from tb_memplugin.record.tensors_inside import tensors_in
from tb_memplugin.record.tracer.recording import StorageRecording
from tb_memplugin.trace import Category, Phase


class IterationRecording(StorageRecording):
    """A `StorageRecording` that is told of gradients as soon as backward creates them, and of inputs."""

    names_others = False  # the figures are of one model

    def _add_unseen(self) -> None:
        """Do not search: the start state of the next reported iteration counts it."""

    def name_gradient(self, weight: torch.Tensor, name: str) -> None:
        """Name the storage of a weight's gradient."""
        if self.layers.on and weight.grad is not None:
            row = self.layers.names.owner_of.get(id(weight), (-1, ""))[0]
            self._name([(weight.grad, Category.GRADIENT, row, _label(name))])

    def blocks_of(self, tensor: torch.Tensor) -> list[Block | Buffer]:
        """Return the blocks of a tensor's storages."""
        ledger = self.recorded.ledger
        with ledger.lock:
            return list(ledger.blocks_of(self._mine([tensor]), late=True))

    def name_freed_gradient(self, weight_id: int, name: str, blocks: Sequence[Block | Buffer]) -> None:
        """Name the blocks that were the gradient of a weight with this `id`, which may have been freed."""
        row = self.layers.names.owner_of.get(weight_id, (-1, ""))[0]
        for block in blocks:
            if block.category is Category.UNKNOWN:
                block.category, block.label = Category.GRADIENT, _label(name)
                block.module = row if row >= 0 else block.module

    def record_inputs(self, inputs: Any) -> None:
        """Record what the model is called with as inputs, unless it has another category already."""
        ledger = self.recorded.ledger
        if not self.layers.on:
            return
        with ledger.lock:
            for block in ledger.blocks_of(self._mine(tensors_in(inputs)), late=True):
                if block.category is Category.UNKNOWN and block.phase in (Phase.BEFORE, Phase.OTHER):
                    block.category = Category.INPUT


def _label(name: str) -> str:
    return f"{name} (gradient)"
