"""The interface of PyTorch Memory Profiler: `memory_profiler(model, print_period, csv)`."""

from tb_memplugin.record.iterations import IterationReport

memory_profiler = IterationReport

__all__ = ["memory_profiler"]
