"""torch's own pipeline schedules: they run unchanged, except for a vote whose result is a tensor value.

Before its first step, a schedule lets its stages vote whether all of them were given the shapes of their
inputs and outputs (`PipelineStage(input_args=..., output_args=...)`). If not, the first micro-batch is run
once to find the shapes, which stages send each other as Python objects: see post.py.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from tb_memplugin.estimate.plugins.plugin import replaced

_MODULE = "torch.distributed.pipelining.schedules"


class Pipelining:
    """The plugin for torch.distributed.pipelining, which must be imported before the estimate begins."""

    name = "torch.distributed.pipelining"

    def applies(self) -> bool:
        """Return whether its schedules are imported."""
        return _MODULE in sys.modules

    def patch(self) -> AbstractContextManager[None]:
        """Let the stages of this rank vote alone."""
        schedules: Any = importlib.import_module(_MODULE)
        return replaced((schedules._PipelineSchedule, "_warmup_p2p", _vote))


def _vote(_schedule: Any, stages: Sequence[Any], has_backward: bool, *_: Any) -> None:
    """Vote with this rank's stages only: the other ranks are assumed to vote the same.

    Otherwise a rank would wait for shapes that no rank sends.
    """
    modes: Any = importlib.import_module("torch.distributed.pipelining._utils").InferenceMode
    told = [stage for stage in stages if hasattr(stage, "_user_meta")]
    dynamic = any(modes.needs_dynamic(stage._user_meta, has_backward) for stage in told)
    for stage in told:
        stage._inference_mode = modes.DYNAMIC if dynamic else modes.STATIC
