"""A cache for what the Allocator's routes compute once per window and use for every moment."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from dataclasses import dataclass

from tb_memplugin.analysis.allocator import Levels, knows_segments, levels
from tb_memplugin.analysis.layout import Placement
from tb_memplugin.analysis.pending import pending_since
from tb_memplugin.server.session import Opened
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.tables import Int64

KEPT = 4
"""How many replays (one per device and window) are cached: a user views one and compares it with another."""


@dataclass(frozen=True, slots=True)
class Replay:
    """One device of a window. `pending_since` is the result of `analysis.pending.pending_since`."""

    levels: Levels
    placement: Placement
    pending_since: Int64
    knows_segments: bool


class Replays:
    """A cache of the last replays. `Windows` keeps the windows; a replay is dropped with its window."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[int, int], tuple[weakref.ref[MemoryTrace], Replay]] = OrderedDict()

    def of(self, opened: Opened) -> Replay:
        """Return the replay of an opened window's device.

        Raises:
            UnreadableFileError: the segment events contradict each other beyond what can be replayed.
        """
        trace, device = opened.trace, opened.device
        key = (id(trace), device)
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None and kept[0]() is trace:
                self._kept.move_to_end(key)
                return kept[1]
            made = Replay(
                levels(trace, device),
                Placement(trace, device),
                pending_since(trace, device),
                knows_segments(trace, device),
            )
            self._kept[key] = (weakref.ref(trace, lambda _: self._kept.pop(key, None)), made)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
            return made


REPLAYS = Replays()
"""The cache of the process: TensorBoard creates one instance of the plugin."""
