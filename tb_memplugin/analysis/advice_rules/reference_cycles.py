"""Advice: memory that only reference cycles hold, until Python's garbage collector runs."""

from __future__ import annotations

import numpy as np

from tb_memplugin.analysis.block_origins import Judged
from tb_memplugin.analysis.findings import Evidence, Finding, Fine, NotJudged, Result, Where
from tb_memplugin.analysis.sums import sums
from tb_memplugin.trace.labels import HOLDERS_SEARCHED, IN_CYCLE

MOST_EVIDENCE = 5
"""How many cycles are listed, those with most bytes first."""


def reference_cycles(judged: Judged) -> Result:
    """Find blocks that outlive the window and that only a reference cycle holds.

    Recordings of ours look for what holds the blocks that outlive a window, and say it in their labels. The
    finding's bytes are those of all such blocks.
    """
    trace, device = judged.trace, judged.device
    blocks = trace.allocations
    if HOLDERS_SEARCHED not in trace.properties:
        return NotJudged("The recording does not tell what holds the memory that outlives it.")
    in_cycle = np.array([*(label.startswith(IN_CYCLE) for label in trace.labels), False], bool)
    alive = (blocks.freed >= len(trace.events)) & (blocks.device == device)
    rows = np.flatnonzero(alive & in_cycle[blocks.label])
    if not len(rows):
        return Fine("No reference cycle holds any of the memory that outlives the window.")
    label = blocks.label[rows].astype(np.int64)
    size = sums(label, blocks.bytes[rows], len(trace.labels))
    count = np.bincount(label, minlength=len(trace.labels))
    used = np.flatnonzero(count)
    largest = used[np.argsort(-size[used], kind="stable")[:MOST_EVIDENCE]].tolist()
    subject = "block is" if len(rows) == 1 else "blocks are"
    return Finding(
        kind="reference_cycles",
        level="problem",
        device=trace.devices[device].name,
        step=None,
        title=f"{len(rows):,} {subject} held only by reference cycles, until the garbage collector runs.",
        subject="",
        bytes=int(size.sum()),
        measure="that nothing uses",
        of_bytes=int(trace.live(device).max()),
        evidence=tuple(
            Evidence(
                trace.labels[row].removeprefix(IN_CYCLE), int(size[row]), f"{count[row]:,} alive at the end"
            )
            for row in largest
        ),
        where=Where("allocations", (("search", IN_CYCLE.strip()),)),
        what_to_do="Break the cycle: delete one of the attributes that form it, or hold one of them with "
        "weakref. Or call gc.collect() where the memory should be free.",
    )
