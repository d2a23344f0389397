"""torch's own pipeline schedules: they run unchanged, except for two decisions that depend on real tensors.

Before its first step, a schedule lets its stages vote whether all of them were given the shapes of their
inputs and outputs (`PipelineStage(input_args=..., output_args=...)`). If not, the first micro-batch is run
once to find the shapes, which stages send each other as Python objects: see `Post` in fake_group.py.

Since PyTorch 2.15, a stage frees an output once it is sent, but only if it is a plain tensor.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tb_memplugin.estimate.libraries.plugins.plugin import replaced

_MODULE = "torch.distributed.pipelining.schedules"

_VOTES = ("_warmup_p2p", "_initialize_pipeline_distributed_state")
"""The names of the method that holds the vote: until PyTorch 2.14, and since 2.15."""

_RELEASES = "_output_slot_is_releasable"
"""The name of the method that decides whether an output is freed once it is sent: since 2.15."""

_PLAIN = torch.empty(0, device="cpu")
"""Stands for an output, of which that method only reads the type."""


class Pipelining:
    """The plugin for torch.distributed.pipelining, which must be imported before the estimate begins."""

    name = "torch.distributed.pipelining"

    def applies(self) -> bool:
        """Return whether its schedules are imported."""
        return _MODULE in sys.modules

    def patch(self) -> AbstractContextManager[None]:
        """Let the stages of this rank vote alone, and treat fake tensors as the plain ones they stand for."""
        schedules: Any = importlib.import_module(_MODULE)
        schedule, stage = schedules._PipelineSchedule, schedules._PipelineStageBase
        # A method that this version of PyTorch does not have is added, and never called.
        return replaced(
            *((schedule, name, _vote) for name in _VOTES),
            (stage, _RELEASES, _as_if_plain(getattr(stage, _RELEASES, None))),
        )


def _vote(_schedule: Any, stages: Sequence[Any], has_backward: bool, *_: Any) -> None:
    """Vote with this rank's stages only: the other ranks are assumed to vote the same.

    Otherwise a rank would wait for shapes that no rank sends. Since 2.15 the replaced method also makes a
    process group for each pair of stages, if the user wants that; here the group of all stages is used.
    """
    for stage in stages:
        stage.p2p_per_edge = False
    modes: Any = importlib.import_module("torch.distributed.pipelining._utils").InferenceMode
    with_meta = [stage for stage in stages if hasattr(stage, "_user_meta")]
    dynamic = any(modes.needs_dynamic(stage._user_meta, has_backward) for stage in with_meta)
    for stage in with_meta:
        stage._inference_mode = modes.DYNAMIC if dynamic else modes.STATIC


def _as_if_plain(original: Any) -> Callable[..., Any]:
    """Return a method that decides on a fake tensor as the original does on a plain one."""

    def decide(stage: Any, output: Any) -> Any:
        return original(stage, _PLAIN if type(output) is FakeTensor else output)

    return decide
