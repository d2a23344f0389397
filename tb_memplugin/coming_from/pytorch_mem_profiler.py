"""PyTorch Memory Profiler's `memory_profiler(model, print_period, csv)` is our `IterationReport`."""

from tb_memplugin.iterations import IterationReport

memory_profiler = IterationReport

__all__ = ["memory_profiler"]
