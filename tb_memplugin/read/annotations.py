"""Annotations: named ranges of a snapshot, a profile or a Kineto trace, and labels that blocks got later.

Labels that a program gave to tensors after they were allocated (`_annotate_tensor`, since PyTorch 2.15) are
entries of a snapshot with the address of a block that is alive then; a block may have several.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tb_memplugin.read.snapshot.entries import LATEST_US
from tb_memplugin.read.snapshot.tables import cut
from tb_memplugin.read.tables import Names
from tb_memplugin.trace import Annotations, Events, MemoryTrace, Note, Step
from tb_memplugin.trace.labels import JOIN
from tb_memplugin.trace.replay import blocks_at
from tb_memplugin.trace.tables import MODULE_MARK, Bool, Int64

STAGES = {"START": 0, "END": 1}


@dataclass(frozen=True, slots=True)
class FoundAnnotations:
    """The table of annotations, their names, and how many annotations were left out as invalid."""

    table: Annotations
    names: tuple[str, ...]
    left_out: int


def read_annotations(written: Any, device_rows: dict[int, int], events: Events) -> FoundAnnotations:
    """Return the annotations of all devices, each with the event that it follows.

    Args:
        written: `external_annotations` as PyTorch writes them: name, stage, device, time_us.
        device_rows: the row of each device number.

    Raises:
        TypeError, KeyError: `written` is not a list of dicts, or a field is missing or has a wrong type.
    """
    if written is None:
        written = []
    if not isinstance(written, list):
        raise TypeError(f"external_annotations are {type(written).__name__}")
    placed = [annotation for annotation in written if _fits(annotation, device_rows)]
    names = Names()
    time = np.array([annotation["time_us"] for annotation in placed], np.int64) * 1_000
    order = np.argsort(time, kind="stable")
    device = np.array([device_rows[annotation["device"]] for annotation in placed], np.uint8)[order]
    table = Annotations(
        time_ns=time[order],
        name=names.add_all(cut(annotation["name"]) for annotation in placed)[order].astype(np.int32),
        ends=np.array([STAGES[annotation["stage"]] for annotation in placed], np.uint8)[order],
        device=device,
        event=event_before(time[order], device, sorted(device_rows.values()), events),
    )
    return FoundAnnotations(table, names.as_tuple(), len(written) - len(placed))


def _fits(annotation: dict[str, Any], device_rows: dict[int, int]) -> bool:
    if not isinstance(annotation["name"], str) or type(annotation["time_us"]) is not int:
        raise TypeError("the name or time of an annotation has the wrong type")
    if type(annotation["stage"]) is not str:
        raise TypeError("the stage of an annotation is not a string")
    number = annotation["device"]
    has_device = type(number) is int and number in device_rows
    return has_device and annotation["stage"] in STAGES and 0 <= annotation["time_us"] < LATEST_US


def event_before(time: np.ndarray, device: np.ndarray, rows: Sequence[int], events: Events) -> np.ndarray:
    """Return, for each time and device, the index of the device's last event at or before it, -1 for none."""
    before = np.full(len(time), -1, np.int64)
    for row in rows:
        here, mine = np.flatnonzero(events.device == row), np.flatnonzero(device == row)
        if len(here) and len(mine):
            last = np.searchsorted(events.time_ns[here], time[mine], side="right") - 1
            before[mine] = np.where(last >= 0, here[last.clip(min=0)], -1)
    return before


MOST_RANGES = 100_000
"""The largest number of ranges to keep (the longest): a loop that annotates every operator has millions."""


def annotations_of(
    names: Sequence[str], start_ns: Int64, end_ns: Int64, devices: int, events: Events
) -> tuple[Annotations, tuple[str, ...]]:
    """Return START and END of every named range (`record_function`, optimizer steps, `ProfilerStep#`).

    The names are returned, too. A range belongs to a thread, not to a device, so it is repeated for each
    device.

    Args:
        start_ns, end_ns: its start and end, epoch nanoseconds.
    """
    rows = np.sort(np.argsort(start_ns - end_ns, kind="stable")[:MOST_RANGES])
    name_table = Names()
    name = name_table.add_all(names[row] for row in rows.tolist())
    time = np.concatenate((start_ns[rows], end_ns[rows]))
    ends = np.repeat(np.array([0, 1], np.uint8), len(rows))
    order = np.argsort(time, kind="stable")
    device = np.repeat(np.arange(devices, dtype=np.uint8), len(order))
    order = np.tile(order, devices)
    ordered = np.lexsort((device, time[order]))
    order, device = order[ordered], device[ordered]
    table = Annotations(
        time_ns=time[order],
        name=np.tile(name, 2)[order].astype(np.int32),
        ends=ends[order],
        device=device,
        event=event_before(time[order], device, range(devices), events),
    )
    return table, name_table.as_tuple()


def with_different_starts(steps: Iterable[Step]) -> tuple[Step, ...]:
    """Return steps in their order; of those that begin together only the first."""
    first: dict[int, Step] = {}
    for step in steps:
        first.setdefault(step.start_ns, step)
    return tuple(first.values())


PROFILER_STEP = re.compile(r"ProfilerStep#(\d{1,18})\Z")

RENUMBERED = Note(
    "The snapshot contains the steps of several profiles, each with its own numbers (ProfilerStep#). Here "
    "they are numbered from 0 in time order.",
    "steps_renumbered",
)


def steps_of(
    table: Annotations, names: Sequence[str], span: tuple[int, int]
) -> tuple[tuple[Step, ...], tuple[Note, ...]]:
    """Return the steps of a window in time order, and notes; if none is annotated, it is step 0 as a whole.

    Every profile counts its steps from 0. If a snapshot contains several profiles, so that a number occurs
    again, all its steps are numbered from 0 in time order, and a note says so.

    Args:
        table: the annotations, in time order.
        span: the window's start and end, epoch nanoseconds.
    """
    numbers = {row: int(match[1]) for row, name in enumerate(names) if (match := PROFILER_STEP.match(name))}
    starts: dict[tuple[int, int], int] = {}
    begun: dict[tuple[int, int], int] = {}
    ended: dict[tuple[int, int], int] = {}
    columns = (table.name, table.device, table.ends, table.time_ns)
    for name, device, ends, time in zip(*(column.tolist() for column in columns), strict=True):
        if name not in numbers:
            continue
        number = numbers[name]
        profile = starts.get((device, number), 0)  # 0: an end whose start is older than the window
        if ends:
            ended[number, profile] = time
        else:
            starts[device, number] = profile + 1
            begun.setdefault((number, profile + 1), time)
    again = any(profile > 1 for _, profile in begun)
    steps = [
        Step(row if again else key[0], start, ended.get(key, span[1]))
        for row, (key, start) in enumerate(begun.items())
    ]
    return with_different_starts(steps) or (Step(0, *span),), (RENUMBERED,) if again else ()


def with_later_labels(trace: MemoryTrace, annotates: Bool) -> MemoryTrace:
    """Return the trace with the labels that blocks got later, behind their own.

    Args:
        annotates: which of its events are such labels: shape (events,).
    """
    given = np.flatnonzero(annotates & (trace.events.label >= 0))
    if not len(given):
        return trace
    blocks = trace.allocations
    rows = blocks_at(trace.events.address[given], given, blocks)
    texts: dict[int, dict[str, None]] = {}
    for row, event in zip(rows.tolist(), given.tolist(), strict=True):
        if row >= 0:
            texts.setdefault(row, {})[trace.labels[trace.events.label[event]]] = None
    labels = Names()
    labels.add_all(trace.labels)
    label = blocks.label.copy()
    for row, later in texts.items():
        own = trace.labels[label[row]] if label[row] >= 0 else MODULE_MARK
        label[row] = labels.add(cut(JOIN.join([*([] if own.startswith(MODULE_MARK) else [own]), *later])))
    start, of_events = len(trace.start), trace.events.label.copy()
    of_events[blocks.born[start:]] = label[start:]
    return replace(
        trace,
        events=replace(trace.events, label=of_events),
        start=replace(trace.start, label=label[:start]),
        labels=labels.as_tuple(),
    )
