"""Mosaic's class for a loaded snapshot and its peak."""

from __future__ import annotations

from tb_memplugin import analysis
from tb_memplugin.errors import MemPluginError
from tb_memplugin.trace import MemoryTrace

PEAK = "memory_peak"


class MemorySnapshot:
    """A loaded snapshot. `memory_peak` (bytes) and `device` are set by `analyze_memory_snapshot`."""

    def __init__(self, trace: MemoryTrace) -> None:
        self.trace = trace
        self.memory_peak = 0
        self.device = ""

    def analyze_memory_snapshot(self, opt: str = PEAK) -> None:
        """Find the peak of the device on which it is highest.

        Raises:
            MemPluginError: `opt` is not "memory_peak".
        """
        if opt != PEAK:
            raise MemPluginError(
                f"There is no analysis {opt!r}.",
                where="opt",
                fix=f'Give "{PEAK}", or call tb_memplugin.analysis.',
            )
        peak = analysis.peak(self.trace)
        self.memory_peak, self.device = peak.bytes, peak.device
