"""The memory curve of a device over the whole window, in any division."""

from __future__ import annotations

from tb_memplugin.analysis.breakdown import By
from tb_memplugin.analysis.curve import Curve, curve
from tb_memplugin.analysis.rules import Rules
from tb_memplugin.trace import MemoryTrace


def profile_over_time(
    trace: MemoryTrace, device: int, by: By | Rules = "category", columns: int = 1_000
) -> Curve:
    """Return `curve` over the whole window: from the first event of any device to the last.

    Args:
        trace: any trace.
        device: row in `trace.devices`.
        by: what the bands divide by.
        columns: how many pixel columns.
    """
    time = trace.events.time_ns
    first, last = (int(time[0]), int(time[-1])) if len(time) else (0, 0)
    return curve(trace, device, first, max(last, first + 1), columns, by)
