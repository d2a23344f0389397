"""Annotations as nested ranges, and which of them was open when a block was born."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.tables import Int64

NONE = -1


@dataclass(frozen=True, slots=True)
class AnnotationRange:
    """One annotation from its START to its END. Epoch nanoseconds; events as in `Annotations.event`.

    `end_ns` and `end_event` are None where it was still open at the end of the trace, `start_ns` and
    `start_event` where it was open before the first annotation. `depth` counts the ranges that were open
    when it began; `parent` is the place of the innermost of them in the tuple, -1 for none.
    """

    name: str
    start_ns: int | None
    end_ns: int | None
    start_event: int | None
    end_event: int | None
    depth: int
    parent: int


@dataclass(slots=True)
class _Nesting:
    """Ranges, in order of their start: the rows that start and end them, None for not recorded.

    `innermost`: the youngest open range after each row, `NONE` where none is open; its first entry is
    from before the first row. `names`: of the ranges.
    """

    names: list[int] = field(default_factory=list)
    starts: list[int | None] = field(default_factory=list)
    ends: list[int | None] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    innermost: list[int] = field(default_factory=list)


def annotation_ranges(trace: MemoryTrace, device: int) -> tuple[AnnotationRange, ...]:
    """The annotations of a device (its row) as nested ranges, in order of their start.

    An END closes the youngest open range of its name: nothing but the name tells ranges apart. One that
    closes none belongs to a range that was open from before the first annotation on.
    """
    written = trace.annotations
    rows = np.flatnonzero(written.device == device)
    found = _nested(written.name[rows].tolist(), written.ends[rows].tolist())
    at, event = written.time_ns[rows].tolist(), written.event[rows].tolist()
    columns = (found.names, found.starts, found.ends, found.depths, found.parents)
    return tuple(
        AnnotationRange(
            name=trace.annotation_names[name],
            start_ns=None if start is None else at[start],
            end_ns=None if end is None else at[end],
            start_event=None if start is None else event[start],
            end_event=None if end is None else event[end],
            depth=depth,
            parent=parent,
        )
        for name, start, end, depth, parent in zip(*columns, strict=True)
    )


def innermost_at_birth(trace: MemoryTrace, rows: npt.NDArray[np.intp] | slice) -> Int64:
    """The innermost open annotation at the birth of allocations: rows of `annotation_names`, -1 for none.

    Only annotations of an allocation's own device count. Blocks of the start state get -1, which there
    means "not known".
    """
    blocks, written = trace.allocations, trace.annotations
    born, device = blocks.born[rows], blocks.device[rows]
    found = np.full(len(born), NONE, np.int64)
    for row in np.unique(written.device).tolist():
        mine = np.flatnonzero(written.device == row)
        nested = _nested(written.name[mine].tolist(), written.ends[mine].tolist())
        names = np.array([*nested.names, NONE], np.int64)  # the last one is for NONE
        here = np.flatnonzero((device == row) & (born >= 0))
        # An annotation stands behind its event: only later births come after it.
        passed = np.searchsorted(written.event[mine], born[here], side="left")
        found[here] = names[np.array(nested.innermost, np.int64)[passed]]
    return found


def _nested(names: list[int], is_end: list[int]) -> _Nesting:
    """Match starts and ends: a loop over annotations, of which there are few beside events."""
    found = _Nesting()
    opened: list[int] = []  # open ranges, youngest last; closed ones below the youngest may linger
    closed: list[bool] = []
    of_name: defaultdict[int, list[int]] = defaultdict(list)
    count = 0

    def begin(name: int, row: int | None) -> None:
        found.names.append(name)
        found.starts.append(row)
        found.ends.append(None)
        found.depths.append(count)
        found.parents.append(opened[-1] if opened else NONE)
        closed.append(False)
        opened.append(len(closed) - 1)
        of_name[name].append(len(closed) - 1)

    for name in reversed(_ends_alone(names, is_end)):  # what ends last was open first
        begin(name, None)
        count += 1
    found.innermost.append(opened[-1] if opened else NONE)
    for row, (name, ending) in enumerate(zip(names, is_end, strict=True)):
        if ending:
            place = of_name[name].pop()
            found.ends[place] = row
            closed[place] = True
            while opened and closed[opened[-1]]:
                opened.pop()
            count -= 1
        else:
            begin(name, row)
            count += 1
        found.innermost.append(opened[-1] if opened else NONE)
    return found


def _ends_alone(names: list[int], is_end: list[int]) -> list[int]:
    """The names of ENDs before which no range of their name is open, in order."""
    opened: Counter[int] = Counter()
    alone: list[int] = []
    for name, ending in zip(names, is_end, strict=True):
        if ending and not opened[name]:
            alone.append(name)
        else:
            opened[name] += -1 if ending else 1
    return alone
