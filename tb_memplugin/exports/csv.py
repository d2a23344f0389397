"""CSV: one row per allocation, for spreadsheets and data frames.

Text that a spreadsheet would take for a formula (it begins with `=`, `+`, `-`, `@`, a tab or a carriage
return) gets an apostrophe in front. Unknown values are empty cells. The columns are `COLUMNS`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from tb_memplugin.analysis.allocations import versions
from tb_memplugin.analysis.divisions import By, codes
from tb_memplugin.exports.output import replacing
from tb_memplugin.extras import library
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.result import Column, Names
from tb_memplugin.trace.tables import Bool, Int64

COLUMNS = (
    *("device", "address", "address_version", "bytes", "rounded_bytes", "category", "phase", "module"),
    *("operator", "name", "tensor", "annotation", "context", "stream", "pool", "born_event", "born_ns"),
    *("freed_event", "freed_ns", "line", "stack_number", "stack"),
)
"""Events are indices in the whole trace, times are epoch nanoseconds. `born_*` is empty for blocks alive
before the first event, `freed_*` for blocks alive after the last. The frames of a stack, innermost first, are
joined by ` <- ` ("called from"); allocations with the same stack have the same `stack_number`.
`address_version` is the form that `tb-memplugin usage --allocation` accepts: the address and the number of
blocks that lived there before."""

FORMULA = ("=", "+", "-", "@", "\t", "\r")
ROWS_AT_ONCE = 1 << 10


def write(trace: MemoryTrace, path: str | os.PathLike[str], stacks: bool = True) -> None:
    """Write one row per allocation, in order of allocation.

    Args:
        stacks: False leaves the column `stack` empty, which makes the file much smaller.

    Raises:
        MemPluginError: the file cannot be written.
    """
    cells = {name: _cells(column) for name, column in columns(trace, stacks).items()}
    address = trace.allocations.address
    cells["address"] = (f"{each:#x}" if each else "" for each in _values(address))
    versioned = zip(_values(address), _values(versions(trace)), strict=True)
    cells["address_version"] = (f"{each:#x}_{version}" if each else "" for each, version in versioned)
    rows = map(",".join, zip(*(cells[name] for name in COLUMNS), strict=True))
    with replacing(path) as stream:
        stream.write((",".join(COLUMNS) + "\n").encode())
        while lines := list(islice(rows, ROWS_AT_ONCE)):
            stream.write(("\n".join(lines) + "\n").encode())


def cell(value: object) -> str:
    """Return a value as a CSV cell that no spreadsheet takes for a formula; None is an empty one."""
    if not isinstance(value, str):
        return "" if value is None else str(value)
    safe = f"'{value}" if value.startswith(FORMULA) else value
    if any(sign in safe for sign in ',"\n\r'):
        return '"' + safe.replace('"', '""') + '"'
    return safe


def _cells(column: Column) -> Iterator[str]:
    """Yield the cells of a column, each name formatted once; what is not known is an empty cell."""
    if isinstance(column, Names):
        names = [*map(cell, column.names), ""]
        return map(names.__getitem__, _values(column.row))
    values = np.ma.asarray(column)
    cells = zip(_values(values.data), _values(np.ma.getmaskarray(values)), strict=True)
    return ("" if is_unknown else str(value) for value, is_unknown in cells)


def _values(array: np.ndarray) -> Iterator[Any]:
    """Yield the values of an array, of which only some are Python objects at a time."""
    return (
        value for at in range(0, len(array), ROWS_AT_ONCE) for value in array[at : at + ROWS_AT_ONCE].tolist()
    )


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
