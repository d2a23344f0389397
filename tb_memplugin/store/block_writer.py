"""Writing what one tracer saw, block after block: each is a step of its own in the tab."""

from __future__ import annotations

import os
from dataclasses import replace

from tb_memplugin.store.files import absolute
from tb_memplugin.store.writer import RunWriter
from tb_memplugin.trace import MemoryTrace


class BlockWriter:
    """Keeps a `RunWriter` for every folder that one tracer writes to."""

    def __init__(self) -> None:
        self._writers: dict[tuple[str, str], tuple[RunWriter, int]] = {}

    def write(self, trace: MemoryTrace, block: int, logdir: str | os.PathLike[str], worker: str) -> None:
        """Write a traced block as the step of its number; one that stands there goes beside it, as a run.

        Args:
            trace: with one step.
            block: its number, from 0.
            logdir: as for `RunWriter`.
            worker: its name.

        Raises:
            MemPluginError: the folder cannot be written.
        """
        place = absolute(os.fspath(logdir)), worker
        writer, last = self._writers.get(place, (None, -1))
        if writer is None or block <= last:
            writer = RunWriter(*place)
        writer.write(replace(trace, steps=tuple(replace(step, number=block) for step in trace.steps)))
        self._writers[place] = writer, block
