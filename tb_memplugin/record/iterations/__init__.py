"""`IterationReport`: memory iteration by iteration, in the console, in CSV files and in the Memory tab.

`report` has the public class and shows results; `weights` computes bytes by weight, `figures` the results.
"""

from __future__ import annotations

from tb_memplugin.record.iterations.figures import IterationMemory
from tb_memplugin.record.iterations.report import IterationReport
from tb_memplugin.record.iterations.weights import WeightMemory

__all__ = ["IterationMemory", "IterationReport", "WeightMemory"]
