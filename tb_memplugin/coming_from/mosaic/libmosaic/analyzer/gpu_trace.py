"""Mosaic's class for a Kineto trace, of which it finds the user's annotations."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import Any

from tb_memplugin.errors import MemPluginError
from tb_memplugin.loading import kineto_content

ANNOTATION = "user_annotation"


class GPUTrace:
    """A Kineto trace, compressed with gzip or not.

    Attributes:
        trace_file_name: the file; trace_file_size: its MiB.
        trace_data: the content of the file, with its `traceEvents`, after `load_gpu_trace`.
    """

    def __init__(self, filename: str | os.PathLike[str] | None = None) -> None:
        self.trace_file_name: str | None = None
        self.trace_file_size: float | None = None
        self.trace_data: dict[str, Any] | None = None
        if filename is not None:
            self.register_trace_file(filename)

    def register_trace_file(self, file_name: str | os.PathLike[str]) -> None:
        """Set the file that `load_gpu_trace` reads."""
        self.trace_file_name = os.fspath(file_name)
        self.trace_file_size = Path(file_name).stat().st_size / (1 << 20)

    def load_gpu_trace(self) -> None:
        """Read the file whole.

        Raises:
            UnreadableFileError: it is no Kineto trace, or is damaged or too large.
            MemPluginError: no file was registered.
        """
        name = self.trace_file_name
        if name is None:
            raise MemPluginError(
                "No Kineto trace was registered.", where="GPUTrace", fix="Call register_trace_file(path)."
            )
        self.trace_data = kineto_content(name)

    def query_op(self, op_name: str, num_op: int = 1) -> list[dict[str, Any]]:
        """Return the first annotations of the user whose name contains a text; 0: all of them.

        The file is read if it has not been.
        """
        if self.trace_data is None:
            self.load_gpu_trace()
        events = self.trace_data["traceEvents"] if self.trace_data else []
        found = (
            event
            for event in events
            if isinstance(event, dict)
            and event.get("cat") == ANNOTATION
            and op_name in str(event.get("name"))
        )
        return list(islice(found, num_op if num_op > 0 else None))
