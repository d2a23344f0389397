"""The divisions that are useful for a window: those for which it records anything."""

from __future__ import annotations

import numpy as np

from tb_memplugin.analysis.breakdown import By
from tb_memplugin.trace import MemoryTrace, Phase

_PARTS_OF_A_STEP = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)


def informative(trace: MemoryTrace, device: int) -> tuple[By, ...]:
    """Return the divisions for which a trace has data, in the order in which to offer them.

    Args:
        trace: any trace.
        device: row in `trace.devices`.
    """
    blocks = trace.allocations
    own = blocks.device == device
    modules = np.array([*(module.is_module for module in trace.modules), False])  # index -1 reads the last
    stacks = bool((blocks.stack[own] >= 0).any())
    available: dict[By, bool] = {
        "category": True,
        "module": bool(modules[blocks.module[own]].any()),
        "phase": bool(np.isin(blocks.phase[own], _PARTS_OF_A_STEP).any()),
        "operator": bool((blocks.operator[own] >= 0).any()),
        "line": stacks,
        "stack": stacks,
        "annotation": bool((trace.annotations.device == device).any()),
        "pool": len(np.unique(blocks.pool[own])) > 1,
        "stream": len(np.unique(blocks.stream[own])) > 1,
        "context": bool((blocks.context[own] >= 0).any()),
    }
    return tuple(by for by, has_data in available.items() if has_data)
