"""Which steps of a training to profile."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from operator import index

from torch.profiler import ProfilerAction

Steps = Iterable[int] | Callable[[int], ProfilerAction] | None
"""Step numbers, or a schedule as `torch.profiler.schedule` makes it, or None for the third and fourth."""

_RECORDING = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)


class ChosenSteps:
    """The steps that a user chose. Steps that follow each other are one window.

    Step N is the one that takes the training from N optimizer steps to N + 1, so the first is 0, as
    torch.profiler counts. Numbers are those of the whole training, resumed ones included; a schedule
    counts from where this run of it began.

    Raises:
        TypeError: neither numbers nor a schedule.
        ValueError: no number at all, or a negative one.
    """

    def __init__(self, steps: Steps = None) -> None:
        self._first = 0
        self._schedule = steps if callable(steps) else _third_and_fourth if steps is None else None
        self._numbers = () if callable(steps) or steps is None else _numbers(steps)

    def start_at(self, first: int) -> None:
        """A training begins, or goes on, at this step."""
        self._first = first

    def has(self, step: int) -> bool:
        """Whether this step is to be profiled."""
        if self._schedule is None:
            return step in self._numbers
        return step >= self._first and self._schedule(step - self._first) in _RECORDING

    def ends_window(self, step: int) -> bool:
        """Whether the window ends with this step, which is to be profiled."""
        if self._schedule is not None:
            saved = self._schedule(step - self._first) == ProfilerAction.RECORD_AND_SAVE
            return saved or not self.has(step + 1)
        return step + 1 not in self._numbers


def _third_and_fourth(step: int) -> ProfilerAction:
    """The optimizer has its state by then, and two steps show what stays."""
    return ProfilerAction.RECORD if step in (2, 3) else ProfilerAction.NONE


def _numbers(steps: Iterable[int]) -> Collection[int]:
    try:
        kept: Collection[int] = steps if isinstance(steps, range) else frozenset(map(index, steps))
    except TypeError as error:
        raise TypeError(
            f"steps is {steps!r}; give whole numbers such as [10] or range(10, 13), "
            "or torch.profiler.schedule(...)"
        ) from error
    if not kept:
        raise ValueError("steps is empty: nothing would be recorded")
    lowest = min(kept[0], kept[-1]) if isinstance(kept, range) else min(kept)
    if lowest < 0:
        raise ValueError(f"steps holds {lowest}; the first step is 0")
    return kept
