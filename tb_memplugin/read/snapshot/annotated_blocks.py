"""Labels that a program gave to tensors after they were allocated (`_annotate_tensor`, since PyTorch 2.15).

Each is an entry of the trace with the address of a block that is alive then; a block may have several.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tb_memplugin.read.snapshot.tables import cut
from tb_memplugin.read.tables import Names
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.labels import JOIN
from tb_memplugin.trace.replay import blocks_at
from tb_memplugin.trace.tables import MODULE_MARK, Bool


def with_later_labels(trace: MemoryTrace, annotates: Bool) -> MemoryTrace:
    """Return the trace with the labels that blocks got later, behind their own.

    Args:
        annotates: which of its events are such labels: shape (events,).
    """
    given = np.flatnonzero(annotates & (trace.events.label >= 0))
    if not len(given):
        return trace
    blocks = trace.allocations
    rows = blocks_at(trace.events.address[given], given, blocks)
    texts: dict[int, dict[str, None]] = {}
    for row, event in zip(rows.tolist(), given.tolist(), strict=True):
        if row >= 0:
            texts.setdefault(row, {})[trace.labels[trace.events.label[event]]] = None
    labels = Names()
    labels.add_all(trace.labels)
    label = blocks.label.copy()
    for row, later in texts.items():
        own = trace.labels[label[row]] if label[row] >= 0 else MODULE_MARK
        label[row] = labels.add(cut(JOIN.join([*([] if own.startswith(MODULE_MARK) else [own]), *later])))
    start, of_events = len(trace.start), trace.events.label.copy()
    of_events[blocks.born[start:]] = label[start:]
    return replace(
        trace,
        events=replace(trace.events, label=of_events),
        start=replace(trace.start, label=label[:start]),
        labels=labels.as_tuple(),
    )
