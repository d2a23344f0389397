"""The columns of all allocations of a trace: for CSV, Parquet, pandas and Arrow."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt

from tb_memplugin.analysis.divisions import By, codes
from tb_memplugin.exports.output import replacing
from tb_memplugin.extras import library
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.result import Column, Names
from tb_memplugin.trace.tables import Bool, Int64

BETWEEN_FRAMES = " <- "
DIVIDED: tuple[By, ...] = ("annotation", "context", "stream", "pool")


def columns(trace: MemoryTrace, stacks: bool = True) -> dict[str, Column]:
    """Return a row for each block that was ever alive: bytes, epoch nanoseconds, indices of events.

    `born_*` is not known of blocks alive before the first event, `freed_*` of blocks alive after the last.

    Args:
        stacks: False has empty texts in place of the stacks.
    """
    blocks, count = trace.allocations, len(trace.events)
    timed = trace.times_are_known
    came, went = blocks.born >= 0, blocks.freed < count
    return {
        "device": Names(blocks.device, [device.name for device in trace.devices]),
        "address": _masked(blocks.address, blocks.address != 0),
        "bytes": blocks.bytes,
        "rounded_bytes": _masked(blocks.rounded, blocks.rounded >= 0),
        "category": _divided(trace, "category"),
        "phase": _divided(trace, "phase"),
        "module": Names(blocks.module, [module.name for module in trace.modules]),
        "operator": Names(blocks.operator, trace.operators),
        "name": Names(blocks.label, trace.labels),
        "tensor": Names(blocks.tensor, map(str, trace.tensors)),
        **{by: _divided(trace, by) for by in DIVIDED},
        "born_event": _masked(blocks.born, came),
        "born_ns": _masked(_times(trace, blocks.born), came & timed),
        "freed_event": _masked(blocks.freed, went),
        "freed_ns": _masked(_times(trace, blocks.freed), went & timed),
        "line": _divided(trace, "line"),
        "stack_number": _masked(blocks.stack.astype(np.int64), blocks.stack >= 0),
        "stack": Names(
            blocks.stack, (BETWEEN_FRAMES.join(stack) if stacks else "" for stack in trace.stacks)
        ),
    }


def write_parquet(trace: MemoryTrace, path: str | os.PathLike[str]) -> None:
    """Write the columns as a Parquet file.

    Raises:
        MemPluginError: pyarrow is not installed, or the file cannot be written.
    """
    parquet: Any = library("pyarrow.parquet", "arrow")
    table = trace.to_arrow()
    with replacing(path) as stream:
        parquet.write_table(table, stream, compression="zstd")


def _masked(values: npt.NDArray[np.integer[Any]], is_known: Bool) -> np.ndarray:
    return np.ma.MaskedArray(values, ~is_known)


def _divided(trace: MemoryTrace, by: By) -> Names:
    return Names(*codes(trace, by))


def _times(trace: MemoryTrace, event: Int64) -> Int64:
    """Return the times of events; any value for events out of range."""
    time_ns = trace.events.time_ns
    return time_ns[np.clip(event, 0, len(time_ns) - 1)] if len(time_ns) else np.zeros(len(event), np.int64)
