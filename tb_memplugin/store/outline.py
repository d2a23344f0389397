"""Outlines: summaries with a step's figures but no breakdown, for steps of windows with short ones.

A full summary takes about a millisecond, which the training waits for. Of a window with few events, that is
most of the handler's time, and as much as reading its side file takes. So a window has as many full summaries
as its size allows. An outline is marked as folded: readers compute the full summary from the side file when
the step is opened.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tb_memplugin.analysis.pool_names import NOT_KNOWN
from tb_memplugin.analysis.steps import StepStats
from tb_memplugin.proto.metadata_pb2 import StepMetadata
from tb_memplugin.proto.summary_pb2 import (
    Account,
    Curve,
    DeviceSummary,
    ModuleTable,
    Note,
    Parts,
    Peak,
    StepSummary,
)
from tb_memplugin.store.paths import readable
from tb_memplugin.store.whole_devices import packed_whole
from tb_memplugin.trace import Category, MemoryTrace, Phase
from tb_memplugin.trace.tables import Int64

MOST_WHOLE = 500
"""The largest number of full summaries in one window with one device; with two devices it is half of that."""

EVENTS_PER_SUMMARY = 2000
"""How many events a window has for each of its full summaries, except for the first."""

_NOTE = "This summary has only the step's figures. The breakdown of the bytes is in the window's side file."


def whole_summaries(trace: MemoryTrace) -> int:
    """Return how many of a window's first steps get full summaries."""
    return max(min(MOST_WHOLE, len(trace.events) // EVENTS_PER_SUMMARY) // max(len(trace.devices), 1), 1)


class Outlines:
    """Makes the outlines of a window's steps.

    Args:
        trace: the window.
        stats: the figures of all steps, for each device.
        accounts: the accounts of the window, for each device.
    """

    def __init__(
        self,
        trace: MemoryTrace,
        stats: Sequence[Sequence[StepStats]],
        accounts: Sequence[Sequence[Account]] = (),
    ) -> None:
        self._trace = trace
        self._accounts = accounts or [()] * len(trace.devices)
        self._blocks = [_blocks_at_peaks(trace, device, steps) for device, steps in enumerate(stats)]
        self._lowest = [_lowest(trace, device) for device in range(len(trace.devices))]

    def outline(self, row: int, metadata: StepMetadata) -> StepSummary:
        """Return the summary of a step without a breakdown: all its bytes are in one part, "not known"."""
        trace = self._trace
        return StepSummary(
            metadata=metadata,
            source=readable(trace.source),
            properties={readable(key): readable(value) for key, value in trace.properties.items()},
            notes=[Note(text=_NOTE, code="summary_shortened")],
            folded=True,
            devices=[self._device(row, device, metadata) for device in range(len(trace.devices))],
        )

    def _device(self, row: int, device: int, metadata: StepMetadata) -> DeviceSummary:
        info, stats = self._trace.devices[device], metadata.devices[device].stats
        count = int(self._blocks[device][row])
        unknown = [0] * len(Category)
        unknown[Category.UNKNOWN] = stats.peak_bytes
        parts = Parts(keys=[NOT_KNOWN], bytes=[stats.peak_bytes], counts=[count])
        return DeviceSummary(
            name=readable(info.name),
            capacity_bytes=info.capacity,
            product=readable(info.product),
            stats=stats,
            peak=Peak(
                event=stats.peak_event,
                time_ns=stats.peak_time_ns,
                bytes=stats.peak_bytes,
                phase=Phase.OTHER,
                by_category=Parts(keys=[Category.UNKNOWN.key], bytes=[stats.peak_bytes], counts=[count]),
                by_operator=parts,
                by_phase=parts,
            ),
            curve=Curve(
                t0_ns=stats.step_start_ns,
                t1_ns=stats.step_end_ns,
                columns=1,
                low=[int(self._lowest[device][row])],
                high=[stats.peak_bytes],
                reserved=[stats.peak_reserved_bytes] if stats.HasField("peak_reserved_bytes") else [],
                categories=[Category.UNKNOWN],
                stacks=[stats.peak_bytes],
                peak_event=stats.peak_event,
                peak_time_ns=stats.peak_time_ns,
            ),
            modules=ModuleTable(
                modules=[-1],
                parents=[-1],
                own=unknown,
                own_count=[count],
                peak_inside=[-1],
                calls=[0],
                allocations=[stats.allocations],
                allocated_bytes=[stats.allocated_bytes],
                forward_ns=[0],
                backward_ns=[0],
            ),
            accounts=self._accounts[device],
            whole_devices=packed_whole(self._trace, device),
        )


def _blocks_at_peaks(trace: MemoryTrace, device: int, stats: Sequence[StepStats]) -> Int64:
    """Return how many blocks of a device are live at each step's peak: int64, shape (steps,)."""
    blocks, peaks = trace.allocations, np.array([step.peak_event for step in stats], np.int64)
    here = blocks.device == device
    freed = np.sort(blocks.freed[here])
    return np.searchsorted(blocks.born[here], peaks, "right") - np.searchsorted(freed, peaks, "right")


def _lowest(trace: MemoryTrace, device: int) -> Int64:
    """Return the lowest live bytes of a device in each step, including its start: int64, shape (steps,)."""
    bounds = np.array([trace.step_events(row) for row in range(len(trace.steps))], np.int64)
    bounds[:, 1] += 1
    level = np.append(trace.live(device), np.iinfo(np.int64).max)
    lowest: Int64 = np.minimum.reduceat(level, bounds.ravel())[::2]
    return lowest
