"""Random states and the random values that they give tensors first, which an estimate does not need.

A state is a tensor that no operator creates (`torch.Generator.get_state`), so it must be recorded here:
activation checkpointing saves one for each call. The states of a GPU are on the CPU too, so they do not count
for the GPU. A loaded one may be a fake tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._prims import rng_prims
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.nn import init
from torch.quasirandom import SobolEngine

from tb_memplugin.estimate.run.correction import Correction
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode
from tb_memplugin.estimate.run.known_values import values_of
from tb_memplugin.estimate.run.patches import Patches
from tb_memplugin.record.tensor_metadata import dense

MADE_BY = "torch::get_rng_state"
"""The operator name that is shown for a state."""


class RandomStates(Correction):
    """Counts each state for as long as the program keeps it."""

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Replace `torch.get_rng_state` on the CPU, and `torch.set_rng_state`."""
        original, original_set = torch.get_rng_state, torch.set_rng_state

        def set_rng_state(new_state: Any) -> None:
            state = values_of(new_state) if type(new_state) is FakeTensor else new_state
            if state is not None:
                original_set(state)

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
            patches.set(owner, "set_rng_state", set_rng_state)
            if self.target.device_type == "cpu":
                patches.set(owner, "get_rng_state", get_rng_state)


class Initialisers(Correction):
    """Runs the loop of torch/nn/init.py once, and what DTensor draws without its random state."""

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Replace the part of `trunc_normal_` that loops, if this version of torch has it.

        Sobol's points are drawn for real: their kernels, on the CPU, read memory by themselves.
        """
        for name in ("__init__", "draw", "reset", "fast_forward"):
            patches.set(SobolEngine, name, unset_fake_temporarily()(vars(SobolEngine)[name]))
        if hasattr(init, "_no_grad_trunc_normal_"):
            patches.set(init, "_no_grad_trunc_normal_", _draw)
        random_operator = getattr(rng_prims, "run_dtensor_rng_op", None)  # PyTorch 2.13
        if random_operator is not None:
            handlers = random_operator.python_key_table
            handlers[CountingFakeMode] = _draw_shard
            patches.on_undo(lambda: handlers.pop(CountingFakeMode, None))


def _draw_shard(mode: CountingFakeMode, _begin: int, _end: int, draw: Any, *args: Any, **kwargs: Any) -> Any:
    with mode:
        return draw(*args, **kwargs)


def _draw(
    tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: Any = None
) -> torch.Tensor:
    with torch.no_grad():
        result = tensor.normal_(mean, std)
        outside = (result < a) | (result > b)
        result = torch.where(outside, torch.empty_like(result).normal_(mean, std), result)
        return tensor.copy_(result)
