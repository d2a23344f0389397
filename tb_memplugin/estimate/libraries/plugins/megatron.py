"""megatron-core: pipeline stages without other ranks, and random states without a GPU.

It was written for and run with megatron-core 0.16.1. The library's layers, tensor parallelism and schedules
run unchanged, in the fake process group of `estimate_ranks`.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from tb_memplugin.estimate.run.patches import do_nothing, replaced

_P2P = "megatron.core.pipeline_parallel.p2p_communication"
_RANDOM = "megatron.core.tensor_parallel.random"


class Megatron:
    """The plugin for megatron-core, which must be imported before the estimate begins."""

    name = "megatron-core"

    def applies(self) -> bool:
        """Return whether megatron.core is imported."""
        return "megatron.core" in sys.modules

    def patch(self) -> AbstractContextManager[None]:
        """Let stages know shapes without communication, and leave random states alone."""
        p2p: Any = importlib.import_module(_P2P)
        random: Any = importlib.import_module(_RANDOM)
        communicator = p2p.P2PCommunicator
        return replaced(
            (communicator, "_communicate", _with_its_shape(communicator._communicate)),
            (communicator, "_communicate_shapes", _shapes),
            (random, "_get_cuda_rng_state", _no_state),
            (random, "_set_cuda_rng_state", do_nothing),
            (random.CudaRNGStatesTracker, "fork", _no_fork),
        )


def _with_its_shape(communicate: Any) -> Any:
    """Wrap `_communicate` to remember its `tensor_shape`, for stages with sequences of any length."""

    @functools.wraps(communicate)
    def run(communicator: Any, *args: Any, tensor_shape: Any = None, **keywords: Any) -> Any:
        communicator._told_shape = tensor_shape
        return communicate(communicator, *args, tensor_shape=tensor_shape, **keywords)

    return run


def _shapes(
    communicator: Any, send_next: Any, send_prev: Any, recv_prev: bool, recv_next: bool
) -> tuple[Sequence[int], Sequence[int]]:
    """Return the shapes that other stages would report: the remembered one, or else that of a sent tensor."""
    sent = next((tensor for tensor in (send_next, send_prev) if tensor is not None), None)
    shape = list(communicator._told_shape) if communicator._told_shape is not None else None
    shape = shape or (list(sent.shape) if sent is not None else [0, 0, 0])
    return (shape if recv_prev else [0, 0, 0]), (shape if recv_next else [0, 0, 0])


def _no_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.zeros(16, dtype=torch.uint8, device="cpu")


def _no_fork(*_: Any, **__: Any) -> AbstractContextManager[None]:
    return nullcontext()
