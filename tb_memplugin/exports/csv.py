"""CSV: one row per allocation, for spreadsheets and data frames.

Text that a spreadsheet would take for a formula (it begins with `=`, `+`, `-`, `@`, a tab or a carriage
return) gets an apostrophe in front. Unknown values are empty cells. The columns are `COLUMNS`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from tb_memplugin.analysis.allocations import versions
from tb_memplugin.analysis.divisions import By, codes
from tb_memplugin.exports.output import replacing
from tb_memplugin.exports.recorded import times_are_known
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
    "tensor",
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
"""Events are indices in the whole trace, times are epoch nanoseconds. `born_*` is empty for blocks alive
before the first event, `freed_*` for blocks alive after the last. The frames of a stack, innermost first, are
joined by ` <- ` ("called from"); allocations with the same stack have the same `stack_number`.
`address_version` is the form that `tb-memplugin usage --allocation` accepts: the address and the number of
blocks that lived there before."""

BETWEEN_FRAMES = " <- "
FORMULA = ("=", "+", "-", "@", "\t", "\r")
ROWS_AT_ONCE = 1 << 10
DIVIDED: tuple[By, ...] = ("annotation", "context", "stream", "pool")


def write(trace: MemoryTrace, path: str | os.PathLike[str], stacks: bool = True) -> None:
    """Write one row per allocation, in order of allocation.

    Args:
        trace: any trace.
        path: the file to write.
        stacks: False leaves the column `stack` empty, which makes the file much smaller.

    Raises:
        MemPluginError: the file cannot be written.
    """
    columns = _columns(trace, stacks)
    rows = map(",".join, zip(*columns, strict=True))
    with replacing(path) as stream:
        stream.write((",".join(COLUMNS) + "\n").encode())
        while lines := list(islice(rows, ROWS_AT_ONCE)):
            stream.write(("\n".join(lines) + "\n").encode("utf-8", "backslashreplace"))


def cell(text: str) -> str:
    """Return text as a CSV cell that no spreadsheet takes for a formula."""
    safe = f"'{text}" if text.startswith(FORMULA) else text
    if any(sign in safe for sign in ',"\n\r'):
        return '"' + safe.replace('"', '""') + '"'
    return safe


def _columns(trace: MemoryTrace, whole_stacks: bool) -> Sequence[Iterator[str]]:
    blocks, events = trace.allocations, trace.events
    timed = times_are_known(trace)
    stacks = [BETWEEN_FRAMES.join(stack) if whole_stacks else "" for stack in trace.stacks]
    modules = [module.name for module in trace.modules]
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
        _named(blocks.tensor, list(map(str, trace.tensors))),
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
    """Yield cells such as `0x7f3a5c000000_2` for the third block at an address; empty without an address."""
    pairs = zip(trace.allocations.address.tolist(), versions(trace).tolist(), strict=True)
    return (f"{address:#x}_{version}" if address else "" for address, version in pairs)


def _named(rows: npt.NDArray[np.signedinteger], table: Sequence[str]) -> Iterator[str]:
    """Yield cells from the rows of a table, each formatted once; row -1 gives an empty cell."""
    cells = [*map(cell, table), ""]
    return map(cells.__getitem__, rows.tolist())


def _divided(trace: MemoryTrace, by: By) -> Iterator[str]:
    part, keys = codes(trace, by)
    return _named(part, keys)


def _numbers(values: npt.NDArray[np.signedinteger], valid: npt.NDArray[np.bool_]) -> Iterator[str]:
    """Yield cells of numbers, empty if a number is not known."""
    cells = map(str, values[valid].tolist())
    return (next(cells) if has else "" for has in valid.tolist())


def _times(time_ns: Int64, event: Int64) -> Int64:
    """Return the times of events; any value for events out of range."""
    if not len(time_ns):
        return np.zeros(len(event), np.int64)
    return time_ns[np.clip(event, 0, len(time_ns) - 1)]
