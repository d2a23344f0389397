"""Annotations: as nested ranges, the innermost of each allocation, and the live bytes at their ends."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tb_memplugin.errors import NotRecordedError
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.result import AnalysisResult, ResultTable
from tb_memplugin.trace.tables import Int64, Rows

NONE = -1


@dataclass(frozen=True, slots=True)
class AnnotationRange(AnalysisResult):
    """One annotation from its START to its END. Epoch nanoseconds; events as in `Annotations.event`.

    `end_ns` and `end_event` are None if the range was still open at the end of the trace, `start_ns` and
    `start_event` if it was open before the first annotation. `depth` counts the ranges that were open when
    it began; `parent` is the index of the innermost of them in the tuple, -1 if there is none.
    """

    name: str
    start_ns: int | None
    end_ns: int | None
    start_event: int | None
    end_event: int | None
    depth: int
    parent: int


@dataclass(slots=True)
class _Range:
    """A range, with the rows that start and end it (None if not recorded)."""

    name: int
    start: int | None
    depth: int
    parent: int
    end: int | None = None


def annotation_ranges(trace: MemoryTrace, device: int) -> ResultTable[AnnotationRange]:
    """Return the annotations of a device (its row) as nested ranges, in order of their start.

    An END closes the most recent open range of its name, because only the name identifies a range. An END
    without an open range belongs to one that was already open before the first annotation.
    """
    annotations = trace.annotations
    rows = np.flatnonzero(annotations.device == device)
    nested, _ = _nested(annotations.name[rows].tolist(), annotations.ends[rows].tolist())
    time_ns, event = annotations.time_ns[rows].tolist(), annotations.event[rows].tolist()
    return ResultTable(
        AnnotationRange(
            name=trace.annotation_names[each.name],
            start_ns=None if each.start is None else time_ns[each.start],
            end_ns=None if each.end is None else time_ns[each.end],
            start_event=None if each.start is None else event[each.start],
            end_event=None if each.end is None else event[each.end],
            depth=each.depth,
            parent=each.parent,
        )
        for each in nested
    )


def innermost_at_birth(trace: MemoryTrace, rows: Rows | slice) -> Int64:
    """Return the innermost annotation open when each block was allocated: rows of `annotation_names`.

    -1 means that none was open; for blocks of the start state, that it is not known. Only annotations of
    the allocation's own device count.
    """
    blocks, annotations = trace.allocations, trace.annotations
    born, device = blocks.born[rows], blocks.device[rows]
    innermost = np.full(len(born), NONE, np.int64)
    for row in np.unique(annotations.device).tolist():
        own = np.flatnonzero(annotations.device == row)
        nested, latest = _nested(annotations.name[own].tolist(), annotations.ends[own].tolist())
        names = np.array([*(each.name for each in nested), NONE], np.int64)  # index NONE (-1) reads the last
        births = np.flatnonzero((device == row) & (born >= 0))
        # An annotation comes after its event, so it applies to allocations at later events only.
        earlier = np.searchsorted(annotations.event[own], born[births], side="left")
        innermost[births] = names[np.array(latest, np.int64)[earlier]]
    return innermost


def _nested(names: list[int], is_end: list[int]) -> tuple[list[_Range], list[int]]:
    """Match starts and ends. A loop is fast enough: there are far fewer annotations than events.

    Returns:
        The ranges in order of their start; and the most recent open range after each row, `NONE` if none is
        open, whose first entry is the range open before the first row.
    """
    nested: list[_Range] = []
    opened: list[int] = []  # open ranges, most recent last; ranges below the last may already be closed
    of_name: defaultdict[int, list[int]] = defaultdict(list)
    count = 0

    def begin(name: int, row: int | None) -> None:
        of_name[name].append(len(nested))
        nested.append(_Range(name, row, count, opened[-1] if opened else NONE))
        opened.append(len(nested) - 1)

    for name in reversed(_ends_alone(names, is_end)):  # the range that ends last was opened first
        begin(name, None)
        count += 1
    innermost = [opened[-1] if opened else NONE]
    for row, (name, ending) in enumerate(zip(names, is_end, strict=True)):
        if ending:
            nested[of_name[name].pop()].end = row
            while opened and nested[opened[-1]].end is not None:
                opened.pop()
            count -= 1
        else:
            begin(name, row)
            count += 1
        innermost.append(opened[-1] if opened else NONE)
    return nested, innermost


def _ends_alone(names: list[int], is_end: list[int]) -> list[int]:
    """Return the names of ENDs that have no open range of their name before them, in order."""
    opened: Counter[int] = Counter()
    alone: list[int] = []
    for name, ending in zip(names, is_end, strict=True):
        if ending and not opened[name]:
            alone.append(name)
        else:
            opened[name] += -1 if ending else 1
    return alone


START: Literal["START"] = "START"
END: Literal["END"] = "END"


@dataclass(frozen=True, slots=True)
class Stage(AnalysisResult):
    """The live bytes of a device at the START or END of an annotation. Epoch nanoseconds.

    `key` is `{name}_{stage}`; from the second time on `{name}_{stage}(1)`, `(2)`, ..., counted separately on
    each device. `event` is the device's last event at or before it, -1 if there is none.
    """

    key: str
    name: str
    stage: Literal["START", "END"]
    device: str
    time_ns: int
    event: int
    bytes: int


def stages(trace: MemoryTrace, names: Collection[str] | None = None) -> ResultTable[Stage]:
    """Return the live bytes at every START and END of the trace's annotations, in time order.

    Args:
        trace: any trace; without annotations it has no stages.
        names: the full names of the annotations to include; default: all.

    Raises:
        NotRecordedError: no annotation has one of the names.
    """
    _check(trace, names)
    annotations = trace.annotations
    columns = (annotations.name, annotations.ends, annotations.device, annotations.time_ns, annotations.event)
    occurrences: Counter[tuple[int, str]] = Counter()
    rows = []
    for row, ends, device, time_ns, event in zip(*(column.tolist() for column in columns), strict=True):
        name = trace.annotation_names[row]
        if names is not None and name not in names:
            continue
        stage = END if ends else START
        key = f"{name}_{stage}"
        earlier = occurrences[device, key]
        occurrences[device, key] += 1
        rows.append(
            Stage(
                key=f"{key}({earlier})" if earlier else key,
                name=name,
                stage=stage,
                device=trace.devices[device].name,
                time_ns=time_ns,
                event=event,
                bytes=int(trace.live(device)[event + 1]),
            )
        )
    return ResultTable(rows)


def _check(trace: MemoryTrace, names: Collection[str] | None) -> None:
    absent = [name for name in names or () if name not in trace.annotation_names]
    if absent:
        have = ", ".join(trace.annotation_names[:20])
        raise NotRecordedError(
            f"No annotation is named {absent[0]!r}.",
            where=trace.source,
            fix=f"Choose from: {have}." if have else "The trace has no annotations at all.",
        )
