"""torch's own pipeline schedules: their stages read values that others sent, so they are refused by name."""

from __future__ import annotations

import importlib
import sys
from contextlib import AbstractContextManager
from typing import Any

from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.plugins.plugin import replaced

_MODULE = "torch.distributed.pipelining.schedules"


class Pipelining:
    """torch.distributed.pipelining, if it is imported before the estimate begins."""

    name = "torch.distributed.pipelining"

    def applies(self) -> bool:
        """Whether its schedules are imported."""
        return _MODULE in sys.modules

    def patch(self) -> AbstractContextManager[None]:
        """Let a schedule's first step say that it cannot be estimated."""
        schedules: Any = importlib.import_module(_MODULE)
        return replaced((schedules._PipelineSchedule, "_initialize_pp_stages", _refuse))


def _refuse(schedule: Any, *_: Any, **__: Any) -> None:
    raise MemPluginError(
        f"{type(schedule).__name__} of torch.distributed.pipelining cannot be estimated: its stages exchange "
        "shapes as values.",
        where="estimate_ranks",
        fix="Estimate a stage's module by itself, with as many micro-batches alive as the schedule holds; "
        "megatron-core's schedules can be estimated.",
    )
