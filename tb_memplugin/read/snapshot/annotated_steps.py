"""Find profiled steps in a snapshot's annotations: torch.profiler's `ProfilerStep#N`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tb_memplugin.read.ranges import with_different_starts
from tb_memplugin.trace import Annotations, Note, Step

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
