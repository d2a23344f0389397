"""`IterationReport`: memory iteration by iteration, in the console, in CSV files and in the Memory tab.

`report` is what people use; `watch` looks at one iteration; `weights` are bytes by name, `figures` the
results; `console` and `csv_files` show them.
"""

from __future__ import annotations

from tb_memplugin.iterations.figures import IterationMemory
from tb_memplugin.iterations.report import IterationReport
from tb_memplugin.iterations.weights import WeightMemory

__all__ = ["IterationMemory", "IterationReport", "WeightMemory"]
