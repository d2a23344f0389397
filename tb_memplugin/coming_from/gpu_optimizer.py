"""Memory Tracer's names: they are ours as well."""

from tb_memplugin.tracer import LayerMemoryStats, MemoryEvent, MemoryTracer

__all__ = ["LayerMemoryStats", "MemoryEvent", "MemoryTracer"]
