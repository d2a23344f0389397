"""Count the CPU random states that programs keep: activation checkpointing saves one for each call.

A state is a tensor that no operator creates (`torch.Generator.get_state`), so it must be recorded here. The
states of a GPU are on the CPU too, so they do not count for the GPU.
"""

from __future__ import annotations

import torch

from tb_memplugin.estimate.run.correction import Correction
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode
from tb_memplugin.estimate.run.patches import Patches
from tb_memplugin.record.tensor_metadata import dense

MADE_BY = "torch::get_rng_state"
"""The operator name that is shown for a state."""


class RandomStates(Correction):
    """Counts each state for as long as the program keeps it."""

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Replace `torch.get_rng_state`."""
        original = torch.get_rng_state

        def get_rng_state() -> torch.Tensor:
            state = original()
            if mode.is_here:
                ledger, scope = mode.ledger, mode.layers.scope()
                mode.settle(scope)
                storage = state.untyped_storage()
                row = ledger.device_row(state.device)
                block = ledger.allocate_storage(storage, storage.nbytes(), row, MADE_BY, scope)
                block.tensor = dense(state)
            return state

        for owner in (torch, torch.random):
            patches.set(owner, "get_rng_state", get_rng_state)
