"""Run programs, by name or path, and print their peaks, on a GPU or on the stand-in (docs/gpu.md)."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import torch

if __name__ == "__main__":
    for name in sys.argv[1:]:
        torch.cuda.reset_peak_memory_stats()
        path = name if name.endswith(".py") else str(Path(__file__).with_name(f"{name}.py"))
        runpy.run_path(path, run_name="__main__")
        print(name, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
