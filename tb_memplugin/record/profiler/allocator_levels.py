"""Read the counters of torch's device allocators, without resetting a peak."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tb_memplugin.record.whole_device.card import counters_in_use
from tb_memplugin.trace import Counter

COUNTERS = {Counter.ALLOCATED: "allocated_bytes", Counter.REQUESTED: "requested_bytes"}


@dataclass(frozen=True, slots=True)
class Level:
    """A counter's bytes now, and its highest value since the program reset it last."""

    current: int
    highest: int


Levels = Mapping[tuple[str, Counter], Level]
"""By device name and counter."""


def allocator_levels() -> Levels:
    """Return the counters of all devices in use, of CUDA's and XPU's allocators."""
    levels: dict[tuple[str, Counter], Level] = {}
    for device, stats in counters_in_use():
        for counter, name in COUNTERS.items():
            if name in stats:
                both = stats[name]["all"]
                levels[device, counter] = Level(both["current"], both["peak"])
    return levels


def highest_between(start: Level, end: Level) -> tuple[int, bool]:
    """Return the highest value between two readings, and whether it is exact, else it is a lower bound.

    The allocator keeps the highest value since the program's last reset. If it rose, the new one is of this
    time; else the value may have come near the old one and gone again.
    """
    if end.highest > start.highest:
        return end.highest, True
    return max(start.current, end.current), False
