"""Mosaic's class for a snapshot file."""

from __future__ import annotations

import os

from tb_memplugin.coming_from.mosaic.libmosaic.analyzer.memory_snapshot import MemorySnapshot
from tb_memplugin.errors import MemPluginError
from tb_memplugin.loading import load


class MemoryAbstract:
    """A snapshot file that is read by `load_memory_snapshot`."""

    def __init__(self, memory_snapshot_file: str | os.PathLike[str]) -> None:
        self.memory_snapshot_file = memory_snapshot_file
        self._snapshot: MemorySnapshot | None = None

    def load_memory_snapshot(self) -> None:
        """Read the file; see `tb_memplugin.load` for the formats and the errors."""
        self._snapshot = MemorySnapshot(load(self.memory_snapshot_file))

    @property
    def memory_snapshot(self) -> MemorySnapshot:
        """The snapshot in the file.

        Raises:
            MemPluginError: the file has not been read yet.
        """
        if self._snapshot is None:
            raise MemPluginError(
                "The snapshot has not been read yet.",
                where=os.fspath(self.memory_snapshot_file),
                fix="Call load_memory_snapshot() first.",
            )
        return self._snapshot
