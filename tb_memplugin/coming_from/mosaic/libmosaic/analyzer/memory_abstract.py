"""Mosaic's class for a snapshot file."""

from __future__ import annotations

import os

from tb_memplugin.coming_from.mosaic.libmosaic.analyzer.memory_snapshot import MemorySnapshot
from tb_memplugin.errors import MemPluginError


class MemoryAbstract:
    """A snapshot file, whose content is in `memory_snapshot` after `load_memory_snapshot`."""

    def __init__(
        self, memory_snapshot_file: str | os.PathLike[str], gpu_trace_file: str | None = None
    ) -> None:
        if gpu_trace_file is not None:
            raise MemPluginError(
                "GPU traces are files of their own here.",
                where=gpu_trace_file,
                fix="Read it with tb_memplugin.load, which takes Kineto traces, too.",
            )
        self.memory_snapshot = MemorySnapshot(memory_snapshot_file)

    def load_memory_snapshot(self) -> None:
        """Read the file; see `tb_memplugin.load` for the formats and the errors."""
        self.memory_snapshot.load_memory_snapshot()
