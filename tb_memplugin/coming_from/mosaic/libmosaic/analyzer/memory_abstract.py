"""Mosaic's class for a snapshot file, and for the Kineto trace of the same job."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tb_memplugin.coming_from.mosaic.libmosaic.analyzer.gpu_trace import GPUTrace
from tb_memplugin.coming_from.mosaic.libmosaic.analyzer.memory_snapshot import MemorySnapshot
from tb_memplugin.errors import MemPluginError


class MemoryAbstract:
    """A snapshot file, whose content is in `memory_snapshot` after `load_memory_snapshot`.

    Attributes:
        gpu_trace: the Kineto trace, without a file if there is none.
        memory_abstract: what `load_memory_abstract` read, or the script set; any JSON.
    """

    def __init__(
        self,
        memory_snapshot_file: str | os.PathLike[str],
        gpu_trace_file: str | os.PathLike[str] | None = None,
    ) -> None:
        self.gpu_trace = GPUTrace(gpu_trace_file)
        self.memory_snapshot = MemorySnapshot(memory_snapshot_file)
        self.memory_abstract: Any = None
        self.global_rank: int | None = None
        self.op_cache: list[object] = []
        self.rank = 0

    def load_memory_snapshot(self) -> None:
        """Read the file; see `tb_memplugin.load` for the formats and the errors."""
        self.memory_snapshot.load_memory_snapshot()

    def load_gpu_trace(self) -> None:
        """Read the Kineto trace; see `GPUTrace.load_gpu_trace`."""
        self.gpu_trace.load_gpu_trace()

    def query_op(self, op_name: str, num_op: int) -> list[dict[str, Any]]:
        """Return annotations of the Kineto trace; see `GPUTrace.query_op`."""
        return self.gpu_trace.query_op(op_name, num_op)

    def output_memory_abstract(self, output_filename: str | os.PathLike[str]) -> None:
        """Write `memory_abstract` as JSON.

        Raises:
            MemPluginError: there is none.
        """
        if self.memory_abstract is None:
            raise MemPluginError(
                "There is no memory abstract.",
                where=os.fspath(output_filename),
                fix="Set memory_abstract, or call load_memory_abstract first.",
            )
        Path(output_filename).write_text(json.dumps(self.memory_abstract), "utf-8")

    def load_memory_abstract(self, filename: str | os.PathLike[str]) -> None:
        """Set `memory_abstract` from a JSON file, or from JSON, which is what Mosaic takes here.

        Raises:
            MemPluginError: it is neither.
        """
        text = os.fspath(filename)
        try:
            self.memory_abstract = json.loads(text)
        except ValueError:
            try:
                self.memory_abstract = json.loads(Path(text).read_text("utf-8"))
            except ValueError as error:
                raise MemPluginError(
                    f"The file is not JSON ({error}).",
                    where=text,
                    fix="Give what output_memory_abstract wrote.",
                ) from error
