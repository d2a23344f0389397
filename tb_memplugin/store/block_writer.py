"""Write the traced blocks of one tracer; each block is one step in the tab."""

from __future__ import annotations

import os
from dataclasses import replace

from tb_memplugin.store.files import absolute
from tb_memplugin.store.writer import RunWriter
from tb_memplugin.trace import MemoryTrace


class BlockWriter:
    """Writes the blocks of one tracer, with one `RunWriter` per folder and worker."""

    def __init__(self) -> None:
        self._writers: dict[tuple[str, str], tuple[RunWriter, int]] = {}

    def write(self, trace: MemoryTrace, block: int, logdir: str | os.PathLike[str], worker: str) -> None:
        """Write a traced block as the step with its number.

        If a block of this or a later number was already written, the block goes into a new run beside it.

        Args:
            trace: a trace with one step.
            block: the number of the block, from 0.
            logdir: as for `RunWriter`.
            worker: the worker's name.

        Raises:
            MemPluginError: the folder cannot be written.
        """
        key = absolute(os.fspath(logdir)), worker
        writer, last = self._writers.get(key, (None, -1))
        if writer is None or block <= last:
            writer, last = RunWriter(*key), -1
        self._writers[key] = writer, last  # before it may fail: a second writer would take another folder
        writer.write(replace(trace, steps=tuple(replace(step, number=block) for step in trace.steps)))
        self._writers[key] = writer, block
