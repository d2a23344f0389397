"""Convert the named ranges of a profile or a Kineto trace to annotations of every device, as in snapshots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from tb_memplugin.read.snapshot.annotations import event_before
from tb_memplugin.read.tables import Names
from tb_memplugin.trace import Annotations, Events, Step
from tb_memplugin.trace.tables import Int64

MOST_RANGES = 100_000
"""The largest number of ranges to keep (the longest): a loop that annotates every operator has millions."""


def annotations_of(
    names: Sequence[str], start_ns: Int64, end_ns: Int64, devices: int, events: Events
) -> tuple[Annotations, tuple[str, ...]]:
    """Return START and END of every named range (`record_function`, optimizer steps, `ProfilerStep#`).

    The names are returned, too. A range belongs to a thread, not to a device, so it is repeated for each
    device.

    Args:
        start_ns, end_ns: its start and end, epoch nanoseconds.
    """
    rows = np.sort(np.argsort(start_ns - end_ns, kind="stable")[:MOST_RANGES])
    name_table = Names()
    name = name_table.add_all(names[row] for row in rows.tolist())
    time = np.concatenate((start_ns[rows], end_ns[rows]))
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
    return table, name_table.as_tuple()


def with_different_starts(steps: Iterable[Step]) -> tuple[Step, ...]:
    """Return steps in their order; of those that begin together only the first."""
    first: dict[int, Step] = {}
    for step in steps:
        first.setdefault(step.start_ns, step)
    return tuple(first.values())
