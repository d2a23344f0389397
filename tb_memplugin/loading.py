"""`load`: a trace from a file, whatever wrote it."""

from __future__ import annotations

import os
from pathlib import Path

from tb_memplugin.sources.snapshot import load_snapshot
from tb_memplugin.store.reader import load_window
from tb_memplugin.trace import MemoryTrace


def load(path: str | os.PathLike[str]) -> MemoryTrace:
    """The memory trace in a file. Nothing in the file is executed.

    Args:
        path: a memory snapshot's pickle (`torch.cuda.memory._dump_snapshot`), or a window that
            `memory_trace_handler` recorded (`window-….mem`).

    Raises:
        UnreadableFileError: neither, truncated, damaged, newer than this reader, or a pickle that
            wants to run code.
        OSError: the file cannot be read.

    Example:
        >>> from tb_memplugin.analysis.peak import peak
        >>> peak(load("snapshot.pickle"), device="cuda:0").bytes
    """
    name = os.fspath(path)
    return load_window(name) if name.endswith(".mem") else load_snapshot(Path(name))
