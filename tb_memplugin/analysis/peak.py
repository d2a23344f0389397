"""The peak: the moment with the most live bytes."""

from __future__ import annotations

from tb_memplugin.analysis.highest_step import highest_step
from tb_memplugin.analysis.moment import Moment, moment
from tb_memplugin.errors import NotRecordedError
from tb_memplugin.trace import MemoryTrace


def peak(
    trace: MemoryTrace, device: str | None = None, step: int | None = None, *, largest: int = 10
) -> Moment:
    """Return the moment with the most live bytes.

    Args:
        trace: any trace.
        device: a device's name; None takes the one with the highest peak.
        step: a step's number; None looks at the whole window.
        largest: how many of the largest live blocks to list.

    Raises:
        NotRecordedError: the trace has no such device or step, or no device at all.
    """
    if not trace.devices:
        raise NotRecordedError(
            "The trace has no device.", where=trace.source, fix="Profile with profile_memory=True."
        )
    rows = trace.device_rows(device)
    steps = None if step is None else [trace.step_row(step)]
    candidates = [(row, highest_step(trace, row, steps)) for row in rows]
    row, highest = max(candidates, key=lambda candidate: candidate[1].peak_bytes)
    return moment(trace, row, highest.peak_event, largest=largest)
