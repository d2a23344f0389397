"""Read raw files of `export_memory_timeline` (`*.raw.json.gz`) as memory traces.

A row is [time, action, signed bytes, category]. The rows contain neither addresses nor devices.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np

from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.read.faults import Tally, notes_on
from tb_memplugin.read.tables import addresses_by_size
from tb_memplugin.trace import (
    Category,
    Counter,
    Device,
    Events,
    Kind,
    MemoryTrace,
    Module,
    Note,
    Reason,
    Step,
    at_every_moment,
    events,
    start_state,
)
from tb_memplugin.trace.tables import MOST_BYTES, NOT_NAMED, Int64, UInt8, UInt64

PREEXISTING, CREATE, INCREMENT_VERSION, DESTROY = 1, 2, 3, 4
"""Values of torch.profiler._memory_profiler.Action."""

CATEGORIES = (
    Category.PARAMETER,
    Category.OPTIMIZER_STATE,
    Category.INPUT,
    Category.TEMPORARY,
    Category.ACTIVATION,
    Category.GRADIENT,
    Category.AUTOGRAD_DETAIL,
    Category.UNKNOWN,
)
"""Categories by their number in torch.profiler._memory_profiler._CATEGORY_TO_INDEX; the last, None there, is
unknown."""

SOURCE = "memory timeline"
WIDTH = 4
NANOSECONDS_FROM = 10**17
"""Times above this (the year 5138 in microseconds) are nanoseconds, which newer versions of PyTorch write."""

LATEST_NS = 1 << 62
FIX = "Export the timeline again: prof.export_memory_timeline('timeline.raw.json.gz', device='cuda:0')."


def is_timeline(content: object) -> bool:
    """Whether a file's JSON looks like a list of timeline rows, judged by its first row."""
    return (
        isinstance(content, list)
        and bool(content)
        and isinstance(content[0], list)
        and len(content[0]) == WIDTH
    )


def trace_from_timeline(content: object, source: str, device: str) -> MemoryTrace:
    """Return the memory trace in a raw timeline.

    The level after each event is the running sum of the rows, in total and per category, except that rows
    which free an unknown block are ignored (a note counts them). Blocks are distinguished by size and
    category and get made-up addresses. The trace has one step, number 0, which is the whole window.

    Args:
        content: the file's JSON, a list of rows.
        device: the device's name, which the file does not contain.

    Raises:
        UnreadableFileError: the content is not a valid list of rows.
    """
    time, action, size, category = _columns(content, source)
    before = action == PREEXISTING
    allocated = int(size[(size > 0) & ~before].sum())
    changed = int(size[(size > 0) & (action == INCREMENT_VERSION)].sum())
    notes = [
        Note(f"The file does not name its device; {device} is assumed.", "device_assumed", device=device),
        Note(
            "The file has no addresses, so it is not known which of several blocks of one size and category "
            f"was freed: which of {allocated:,} allocated bytes lived when. No sum depends on it.",
            "no_addresses",
            allocated,
        ),
        Note(
            "A block whose category changes is shown as freed and allocated again at that moment "
            f"({changed:,} bytes).",
            "category_changes",
            changed,
        ),
    ]
    late = before & (np.cumsum(~before) > 0)
    if late.any():
        notes.append(
            Note(
                f"Blocks of {int(size[late].sum()):,} bytes that were alive before the window appear among "
                "its events; they are moved to its start.",
                "moved_to_start",
                int(size[late].sum()),
            )
        )
    order = np.argsort(~before, kind="stable")
    time, size, category, before = time[order], size[order], category[order], before[order]
    recorded = time[~before]
    backwards = Tally.of(recorded[1:] < recorded[:-1], size[~before][1:])
    notes += notes_on({"events are earlier than the one before; moved to its time": backwards})
    address = addresses_by_size(category.astype(np.int64), size)
    _, first = np.unique(address, return_index=True)
    orphans = first[size[first] < 0]
    if len(orphans):
        notes.append(
            Note(
                f"{len(orphans):,} rows free {-int(size[orphans].sum()):,} bytes in all, of categories "
                "that had no block of that size. They are ignored, so later levels are higher than the "
                "sums in the file.",
                "unmatched_frees",
                -int(size[orphans].sum()),
            )
        )
    count = int(np.count_nonzero(before))
    happened = _events(time[count:], size[count:], category[count:], address[count:])
    return MemoryTrace(
        source=SOURCE,
        events=happened,
        start=start_state(
            size[:count],
            address=address[:count],
            category=category[:count],
            reason=np.full(count, Reason.IN_FILE),
            module=np.zeros(count, np.int32),
        ),
        devices=(Device(device),),
        steps=(_window(happened),),
        modules=(Module(NOT_NAMED),),
        counters=at_every_moment(1, Counter.SEEN),
        notes=tuple(notes),
    )


def _columns(content: object, source: str) -> tuple[Int64, Int64, Int64, UInt8]:
    """Return the columns of the rows: time in nanoseconds, action, signed bytes, category."""
    rows: list[Any] = content if isinstance(content, list) else []
    if not rows or set(map(type, rows)) != {list} or set(map(len, rows)) != {WIDTH}:
        raise UnreadableFileError(
            "The file does not contain a list of [time, action, bytes, category].", where=source, fix=FIX
        )
    kinds = set(map(type, chain.from_iterable(rows)))
    if kinds != {int}:
        names = sorted(kind.__name__ for kind in kinds - {int})
        raise UnreadableFileError(f"The rows contain {names} where numbers belong.", where=source, fix=FIX)
    try:
        flat = np.fromiter(chain.from_iterable(rows), np.int64, len(rows) * WIDTH)
    except OverflowError as error:
        raise UnreadableFileError("A number has more than 64 bits.", where=source, fix=FIX) from error
    time, action, size, category = flat.reshape(-1, WIDTH).T
    _check(time, action, size, category, source)
    scale = 1 if time.max() > NANOSECONDS_FROM else 1_000
    return time * scale, action, size, np.array(CATEGORIES, np.uint8)[category]


def _check(time: Int64, action: Int64, size: Int64, category: Int64, source: str) -> None:
    faults = {
        "an unknown action": (action < PREEXISTING) | (action > DESTROY),
        "an unknown category": (category < 0) | (category >= len(CATEGORIES)),
        "an impossible time": (time < -1) | (time > LATEST_NS),
        "a negative size before the window": (action == PREEXISTING) & (size < 0),
        "an impossible size": (size > MOST_BYTES) | (size < -MOST_BYTES),
    }
    for fault, wrong in faults.items():
        if wrong.any():
            row = int(np.argmax(wrong))
            raise UnreadableFileError(f"Row {row} of the timeline has {fault}.", where=source, fix=FIX)
    if float(np.sum(np.abs(size.astype(np.float64)))) >= MOST_BYTES:
        raise UnreadableFileError("The sum of the rows is impossibly large.", where=source, fix=FIX)


def _events(time: Int64, size: Int64, category: UInt8, address: UInt64) -> Events:
    kind = np.where(size > 0, Kind.ALLOC, Kind.FREE_COMPLETED)
    kind[size == 0] = Kind.MARK
    return events(
        np.maximum.accumulate(time) if len(time) else time,
        kind=kind,
        address=address,
        bytes=np.abs(size),
        category=category,
        reason=np.where(kind == Kind.ALLOC, Reason.IN_FILE, Reason.NOT_RECORDED),
    )


def _window(happened: Events) -> Step:
    time = happened.time_ns
    return Step(0, int(time[0]), int(time[-1]) + 1) if len(time) else Step(0, 0, 1)
