"""Convert the named ranges of a Kineto trace to annotations of every device, as in snapshots."""

from __future__ import annotations

import numpy as np

from tb_memplugin.sources.kineto.ranges import Ranges
from tb_memplugin.sources.snapshot.annotations import event_before
from tb_memplugin.sources.tables import Names
from tb_memplugin.trace import Annotations, Events

MOST_RANGES = 100_000
"""The largest number of ranges to keep (the longest): a loop that annotates every operator has millions."""


def annotations_of(ranges: Ranges, devices: int, events: Events) -> tuple[Annotations, tuple[str, ...]]:
    """Return START and END of every named range (`record_function`, optimizer steps, `ProfilerStep#`).

    The names are returned, too. A range belongs to a thread, not to a device, so it is repeated for each
    device.

    Args:
        ranges: what ran, epoch nanoseconds.
        devices: how many devices the trace has.
        events: the trace's events.
    """
    rows = np.flatnonzero(ranges.annotation | ranges.step)
    longest = np.argsort(ranges.start_ns[rows] - ranges.end_ns[rows], kind="stable")[:MOST_RANGES]
    rows = np.sort(rows[longest])
    names = Names()
    name = names.add_all(ranges.name[row] for row in rows.tolist())
    time = np.concatenate((ranges.start_ns[rows], ranges.end_ns[rows]))
    ends = np.repeat(np.array([0, 1], np.uint8), len(rows))
    order = np.argsort(time, kind="stable")
    device = np.repeat(np.arange(devices, dtype=np.uint8), len(order))
    order = np.tile(order, devices)
    ordered = np.lexsort((device, time[order]))
    order, device = order[ordered], device[ordered]
    table = Annotations(
        time_ns=time[order],
        name=np.tile(name, 2)[order].astype(np.int32),
        ends=ends[order],
        device=device,
        event=event_before(time[order], device, range(devices), events),
    )
    return table, names.as_tuple()
