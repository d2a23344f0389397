"""The size of a recording on disk."""

from __future__ import annotations

import tempfile
from pathlib import Path

from torch.profiler import profile, tensorboard_trace_handler

from benchmarks.figures import Figure
from benchmarks.training import make, profiled
from tb_memplugin import memory_trace_handler
from tb_memplugin.store.reader import load_window, read_recordings


def measure() -> list[Figure]:
    """Measure bytes per event, the side file compared with an exported trace, and kB per step's summary."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, optimizer = make()
        memory = memory_trace_handler(folder / "memory", "w", model=model, optimizer=optimizer)
        kineto = tensorboard_trace_handler(str(folder / "kineto"), use_gzip=True)

        def ready(prof: profile) -> None:
            memory(prof)
            kineto(prof)

        profiled(ready, model, optimizer)
        (side_file,) = folder.rglob("*.mem")
        (exported,) = folder.rglob("*.json.gz")
        events = len(load_window(str(side_file)).events)
        blobs = [len(step.blob) / 1e3 for step in read_recordings(str(folder / "memory")).steps]
        size = side_file.stat().st_size
        return [
            Figure("side file, bytes per event", "B", [size / events], 10),
            Figure("side file", "kB", [size / 1e3], None, [exported.stat().st_size / 1e3], "trace.json.gz"),
            Figure("summary of a step, largest", "kB", [max(blobs)], 100),
        ]
