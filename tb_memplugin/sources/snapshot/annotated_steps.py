"""Find profiled steps in a snapshot's annotations: torch.profiler's `ProfilerStep#N`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tb_memplugin.trace import Annotations, Step

PROFILER_STEP = re.compile(r"ProfilerStep#(\d{1,18})\Z")


def steps_of(found: Annotations, names: Sequence[str], span: tuple[int, int]) -> tuple[Step, ...]:
    """Return the steps of a window in time order; if none is annotated, step 0 for the whole window.

    Args:
        found: the annotations, in time order.
        names: the names of the annotations.
        span: the window's start and end, epoch nanoseconds.
    """
    numbers = {row: int(match[1]) for row, name in enumerate(names) if (match := PROFILER_STEP.match(name))}
    begun: dict[int, int] = {}
    ended: dict[int, int] = {}
    for name, ends, time in zip(
        found.name.tolist(), found.ends.tolist(), found.time_ns.tolist(), strict=True
    ):
        if name in numbers and ends:
            ended[numbers[name]] = time
        elif name in numbers:
            begun.setdefault(numbers[name], time)
    steps = [Step(number, start, ended.get(number, span[1])) for number, start in begun.items()]
    return tuple(steps) or (Step(0, *span),)
