"""The functions of Pytorch Mem Tracer, which share one `LineTracer` per process."""

from tb_memplugin.record.line_tracer import report_stats, start_tracing, stop_tracing, switch_allocator

__all__ = ["report_stats", "start_tracing", "stop_tracing", "switch_allocator"]
