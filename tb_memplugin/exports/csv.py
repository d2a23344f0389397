"""CSV: one row per allocation, for spreadsheets and data frames.

Text that a spreadsheet would take for a formula (it begins with `=`, `+`, `-`, `@`, a tab or a carriage
return) gets an apostrophe in front. What is not known is an empty cell. Columns: `COLUMNS`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from tb_memplugin.analysis.breakdown import By, codes
from tb_memplugin.analysis.usage import versions
from tb_memplugin.exports.changes import times_are_known
from tb_memplugin.exports.output import replacing
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.tables import Int64

COLUMNS = (
    "device",
    "address",
    "address_version",
    "bytes",
    "rounded_bytes",
    "category",
    "phase",
    "module",
    "operator",
    "name",
    "annotation",
    "context",
    "stream",
    "pool",
    "born_event",
    "born_ns",
    "freed_event",
    "freed_ns",
    "line",
    "stack_number",
    "stack",
)
"""Events are indices in the whole trace, times are epoch nanoseconds. `born_*` is empty for what was alive
before the first event, `freed_*` for what outlived the last. Frames of a stack, innermost first, have ` <- `
between them: "called from"; allocations of one stack share its number. `address_version` names a block as
`tb-memplugin usage --allocation` takes it: its address, and how many blocks lived there before it."""

BETWEEN_FRAMES = " <- "
FORMULA = ("=", "+", "-", "@", "\t", "\r")
ROWS_AT_ONCE = 1 << 10
DIVIDED: tuple[By, ...] = ("annotation", "context", "stream", "pool")


def write(trace: MemoryTrace, path: str | os.PathLike[str], stacks: bool = True) -> None:
    """Write one row per allocation, in order of birth.

    Args:
        trace: any trace.
        path: the file to write.
        stacks: False leaves the cells of the column `stack` empty. Whole stacks are most of the file.

    Raises:
        MemPluginError: the file cannot be written.
    """
    columns = _columns(trace, stacks)
    rows = map(",".join, zip(*columns, strict=True))
    with replacing(path) as stream:
        stream.write((",".join(COLUMNS) + "\n").encode())
        while some := list(islice(rows, ROWS_AT_ONCE)):
            stream.write(("\n".join(some) + "\n").encode("utf-8", "backslashreplace"))


def cell(text: str) -> str:
    """Text as one cell of a CSV file that no spreadsheet takes for a formula."""
    safe = f"'{text}" if text.startswith(FORMULA) else text
    if any(sign in safe for sign in ',"\n\r'):
        return '"' + safe.replace('"', '""') + '"'
    return safe


def _columns(trace: MemoryTrace, whole_stacks: bool) -> Sequence[Iterator[str]]:
    blocks, events = trace.allocations, trace.events
    timed = times_are_known(trace)
    stacks = [BETWEEN_FRAMES.join(stack) if whole_stacks else "" for stack in trace.stacks]
    modules = [module.key for module in trace.modules]
    return (
        _named(blocks.device.astype(np.int64), [device.name for device in trace.devices]),
        (f"{address:#x}" if address else "" for address in blocks.address.tolist()),
        _versioned(trace),
        map(str, blocks.bytes.tolist()),
        _numbers(blocks.rounded, blocks.rounded >= 0),
        _divided(trace, "category"),
        _divided(trace, "phase"),
        _named(blocks.module, modules),
        _named(blocks.operator, trace.operators),
        _named(blocks.label, trace.labels),
        *(_divided(trace, by) for by in DIVIDED),
        _numbers(blocks.born, blocks.born >= 0),
        _numbers(_times(events.time_ns, blocks.born), (blocks.born >= 0) & timed),
        _numbers(blocks.freed, blocks.freed < len(events)),
        _numbers(_times(events.time_ns, blocks.freed), (blocks.freed < len(events)) & timed),
        _divided(trace, "line"),
        _numbers(blocks.stack, blocks.stack >= 0),
        _named(blocks.stack, stacks),
    )


def _versioned(trace: MemoryTrace) -> Iterator[str]:
    """`0x7f3a5c000000_2` for the third block at an address of a device; empty where there is no address."""
    pairs = zip(trace.allocations.address.tolist(), versions(trace).tolist(), strict=True)
    return (f"{address:#x}_{version}" if address else "" for address, version in pairs)


def _named(rows: npt.NDArray[np.signedinteger], table: Sequence[str]) -> Iterator[str]:
    """Cells from a table, each made once; row -1 is an empty one."""
    cells = [*map(cell, table), ""]
    return map(cells.__getitem__, rows.tolist())


def _divided(trace: MemoryTrace, by: By) -> Iterator[str]:
    part, keys = codes(trace, by)
    return _named(part, keys)


def _numbers(values: npt.NDArray[np.signedinteger], known: npt.NDArray[np.bool_]) -> Iterator[str]:
    """Numbers where known, else empty cells."""
    told = map(str, values[known].tolist())
    return (next(told) if has else "" for has in known.tolist())


def _times(time_ns: Int64, event: Int64) -> Int64:
    """Times of events; anything for those out of range."""
    if not len(time_ns):
        return np.zeros(len(event), np.int64)
    return time_ns[np.clip(event, 0, len(time_ns) - 1)]
