"""The interface of Memory Tracer. It is the same as ours except for the names of two arguments."""

from __future__ import annotations

import os

from tb_memplugin.record import memory_tracer
from tb_memplugin.record.memory_tracer import LayerMemoryStats, MemoryEvent

__all__ = ["LayerMemoryStats", "MemoryEvent", "MemoryTracer"]


class MemoryTracer(memory_tracer.MemoryTracer):
    """Our `MemoryTracer`, whose exports have a parameter named `output_path`."""

    def export_flame_graph(self, output_path: str | os.PathLike[str]) -> None:
        """See `tb_memplugin.MemoryTracer.export_flame_graph`."""
        super().export_flame_graph(output_path)

    def export_timeline(self, output_path: str | os.PathLike[str]) -> None:
        """See `tb_memplugin.MemoryTracer.export_timeline`."""
        super().export_timeline(output_path)
