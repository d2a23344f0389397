"""Outlines: what a window's event file has of each step, its figures without a breakdown.

A summary takes about a millisecond and is computed from the window alone, so readers make it when somebody
opens the step, and no training waits for it. An outline is marked as folded, so that readers look for the
side file.
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
from tb_memplugin.trace.notes import SUMMARY_SHORTENED
from tb_memplugin.trace.tables import Int64

_NOTE = "This summary has only the step's figures. The breakdown of the bytes is in the window's side file."


class Outlines:
    """Makes the outlines of a window's steps."""

    def __init__(
        self,
        trace: MemoryTrace,
        stats: Sequence[Sequence[StepStats]],
        accounts: Sequence[Sequence[Account]] = (),
    ) -> None:
        self._blocks = [_blocks_at_peaks(trace, device, steps) for device, steps in enumerate(stats)]
        self._lowest = [_lowest(trace, device) for device in range(len(trace.devices))]
        self._same = StepSummary(
            source=readable(trace.source),
            properties={readable(key): readable(value) for key, value in trace.properties.items()},
            notes=[Note(text=_NOTE, code=SUMMARY_SHORTENED)],
            folded=True,
            devices=[
                DeviceSummary(
                    name=readable(device.name),
                    capacity_bytes=device.capacity,
                    product=readable(device.product),
                    peak=Peak(
                        phase=Phase.OTHER,
                        by_category=Parts(keys=[Category.UNKNOWN.key]),
                        by_operator=Parts(keys=[NOT_KNOWN]),
                        by_phase=Parts(keys=[NOT_KNOWN]),
                    ),
                    curve=Curve(columns=1, categories=[Category.UNKNOWN]),
                    modules=ModuleTable(
                        modules=[-1],
                        parents=[-1],
                        peak_inside=[-1],
                        calls=[0],
                        forward_ns=[0],
                        backward_ns=[0],
                    ),
                    accounts=accounts[row] if accounts else (),
                    whole_devices=packed_whole(trace, row),
                )
                for row, device in enumerate(trace.devices)
            ],
        )

    def outline(self, row: int, metadata: StepMetadata) -> StepSummary:
        """Return the summary of a step without a breakdown: all its bytes are in one part, "not known"."""
        summary = StepSummary()
        summary.CopyFrom(self._same)
        summary.metadata.CopyFrom(metadata)
        for number, device in enumerate(summary.devices):
            stats, peak, curve, table = (
                metadata.devices[number].stats,
                device.peak,
                device.curve,
                device.modules,
            )
            size, count = stats.peak_bytes, int(self._blocks[number][row])
            device.stats.CopyFrom(stats)
            peak.event, peak.time_ns, peak.bytes = stats.peak_event, stats.peak_time_ns, size
            for parts in (peak.by_category, peak.by_operator, peak.by_phase):
                parts.bytes.append(size)
                parts.counts.append(count)
            curve.t0_ns, curve.t1_ns = stats.step_start_ns, stats.step_end_ns
            curve.peak_event, curve.peak_time_ns = stats.peak_event, stats.peak_time_ns
            curve.low.append(int(self._lowest[number][row]))
            curve.high.append(size)
            curve.stacks.append(size)
            if stats.HasField("peak_reserved_bytes"):
                curve.reserved.append(stats.peak_reserved_bytes)
            unknown = [0] * len(Category)
            unknown[Category.UNKNOWN] = size
            table.own.extend(unknown)
            table.own_count.append(count)
            table.allocations.append(stats.allocations)
            table.allocated_bytes.append(stats.allocated_bytes)
        return summary


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
