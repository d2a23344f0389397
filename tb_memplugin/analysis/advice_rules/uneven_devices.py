"""Advice: the same code holds far more on one device than on the others."""

from __future__ import annotations

from collections import Counter

from tb_memplugin.analysis.block_origins import Judged
from tb_memplugin.analysis.findings import Evidence, Fine, NotJudged, Result
from tb_memplugin.analysis.units import size_text
from tb_memplugin.trace import Category
from tb_memplugin.trace.kinds import NOT_DATA

LEAST_SHARE = 0.2
"""Least share of the peak by which a device must exceed the mean of all devices for a finding."""

SAME_CODE = 0.8
"""Least share of a device's bytes that must come from lines that allocate on every other device too."""

SHOWN_DEVICES = 8


def uneven_devices(judged: Judged) -> Result:
    """Compare what the same source lines hold on each device at its peak, without the model's own memory.

    The finding's bytes are by how much this device's highest peak would fall if each device held the mean.
    """
    trace, device, step = judged.trace, judged.device, judged.step
    others = [row for row, other in enumerate(trace.devices) if other.has_reserved and trace.live(row).any()]
    if device not in others or len(others) < 2:
        return Fine("The recording has no second device that runs the same code.")
    lines = {row: judged.beside(row).result(_lines) for row in others}
    if not lines[device]:
        return NotJudged("The recording has no stacks.")
    common = set.intersection(*(set(by_line) for by_line in lines.values()))
    shared = {
        row: sum(size for line, size in by_line.items() if line in common) for row, by_line in lines.items()
    }
    if shared[device] < SAME_CODE * lines[device].total():
        return Fine("The devices run different code.")
    mean = sum(shared.values()) // len(shared)
    over = shared[device] - mean
    if over < LEAST_SHARE * step.peak_bytes:
        return Fine(
            f"It holds {size_text(shared[device])} of data, and the mean of all devices is {size_text(mean)}."
        )
    name = judged.name
    largest = sorted(shared, key=lambda row: -shared[row])
    return judged.finding(
        "uneven_devices",
        "problem",
        f"{name} holds {shared[device] / max(mean, 1):.1f} times as much data as the mean of "
        f"{len(shared)} devices that run the same code.",
        over,
        (
            Evidence(
                trace.devices[row].name,
                shared[row],
                f"in {len(common):,} lines that run on all; peak {size_text(int(trace.live(row).max()))}",
                False,
            )
            for row in largest[:SHOWN_DEVICES]
        ),
        "Divide the batch by the size of its samples (tokens, nodes, pixels), not by their number, or limit "
        "the size of a part: the largest part decides what fits.",
        view="stacks",
        state=judged.at_peak,
        subject=name,
        measure="more than the mean",
    )


def _lines(judged: Judged) -> Counter[str]:
    """Return the bytes at the peak of each source line on a device, without the model's own memory."""
    blocks = judged.blocks
    category = judged.trace.allocations.category[blocks.rows]
    by_line: Counter[str] = Counter()
    for row in blocks.at_peak.nonzero()[0].tolist():
        line = blocks.origins[blocks.origin[row]].line
        if line and Category(int(category[row])) not in NOT_DATA:
            by_line[line] += int(blocks.bytes[row])
    return by_line
