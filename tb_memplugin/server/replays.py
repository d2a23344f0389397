"""What the Allocator's routes compute once per window and device, and use for every moment."""

from __future__ import annotations

from dataclasses import dataclass

from tb_memplugin.analysis.allocator import LevelRuns, Levels, Ratio, knows_segments, levels, unused_levels
from tb_memplugin.analysis.layout import Placement, pending_since
from tb_memplugin.server.cache import MIB, Cache
from tb_memplugin.server.session import Opened
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.runs import runs_of
from tb_memplugin.trace.tables import Int64

_REPLAYS = Cache(256 * MIB)
"""About 80 bytes per event, one result for each device and window."""


@dataclass(frozen=True, slots=True)
class Replay:
    """One device of a window. `pending_since` is the result of `analysis.pending.pending_since`."""

    levels: Levels
    unused: Ratio | None
    runs: LevelRuns
    placement: Placement
    pending_since: Int64
    knows_segments: bool


def replay_of(opened: Opened) -> Replay:
    """Return the replay of an opened window's device.

    Raises:
        UnreadableFileError: the segment events contradict each other beyond what can be replayed.
    """
    return _REPLAYS.of_window(
        opened.trace, ("replay", opened.device), lambda: _replay(opened.trace, opened.device)
    )


def _replay(trace: MemoryTrace, device: int) -> Replay:
    memory = levels(trace, device)
    unused = unused_levels(trace, memory)
    runs = LevelRuns(
        trace.live_runs(device), trace.reserved_runs(device), None if unused is None else runs_of(unused)
    )
    return Replay(
        memory,
        unused,
        runs,
        Placement(trace, device),
        pending_since(trace, device),
        knows_segments(trace, device),
    )
