"""The tracer's recording of storages, told more exactly what some of them are."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tb_memplugin.sources.storages import tensors_in
from tb_memplugin.sources.tracer.recording import StorageRecording
from tb_memplugin.trace import Category, Phase


class IterationRecording(StorageRecording):
    """A `StorageRecording` that knows gradients as soon as backward makes them, and the model's inputs."""

    def is_inside(self, module: nn.Module) -> None:
        """A module's call began before the recording did."""
        row = self.layers.names.row_of.get(id(module))
        if row is not None:
            self.layers.here().enter(row)

    def tell_gradient(self, weight: torch.Tensor, name: str) -> None:
        """A weight has a gradient."""
        if self.layers.on and weight.grad is not None:
            row = self.layers.names.owner_of.get(id(weight), (-1, ""))[0]
            self._name([(weight.grad, Category.GRADIENT, row, f"{name} (gradient)")])

    def tell_inputs(self, given: Any) -> None:
        """What the model is called with: inputs, unless it is known to be something else."""
        ledger = self.recorded.ledger
        if not self.layers.on:
            return
        with ledger.lock:
            for block in ledger.take_in(self._mine(tensors_in(given)), late=True):
                if block.category is Category.UNKNOWN and block.phase in (Phase.BEFORE, Phase.OTHER):
                    block.category = Category.INPUT
