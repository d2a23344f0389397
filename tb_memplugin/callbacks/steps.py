"""The choice of which steps of a training to profile."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from operator import index

from torch.profiler import ProfilerAction

Steps = Iterable[int] | Callable[[int], ProfilerAction] | None
"""Step numbers, a schedule from `torch.profiler.schedule`, or None for the third and fourth step."""

_RECORDING = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)


class ChosenSteps:
    """The steps that a user chose. Consecutive steps form one window.

    Step N takes the training from N optimizer steps to N + 1, so the first step is 0, as torch.profiler
    counts. Numbers count from the beginning of the whole training, also if it was resumed; a schedule counts
    from the first step of this run.

    Raises:
        TypeError: `steps` is neither numbers nor a schedule.
        ValueError: `steps` has no number, or a negative one.
    """

    def __init__(self, steps: Steps = None) -> None:
        self._first = 0
        self._schedule = steps if callable(steps) else _third_and_fourth if steps is None else None
        self._numbers = () if callable(steps) or steps is None else _numbers(steps)

    def start_at(self, first: int) -> None:
        """Set the first step of this run of the training."""
        self._first = first

    def has(self, step: int) -> bool:
        """Return whether this step is to be profiled."""
        if self._schedule is None:
            return step in self._numbers
        return step >= self._first and self._schedule(step - self._first) in _RECORDING

    def ends_window(self, step: int) -> bool:
        """Return whether the window ends with this step, which must be one to be profiled."""
        if self._schedule is not None:
            saved = self._schedule(step - self._first) == ProfilerAction.RECORD_AND_SAVE
            return saved or not self.has(step + 1)
        return step + 1 not in self._numbers


def _third_and_fourth(step: int) -> ProfilerAction:
    """Record steps 2 and 3: the optimizer has its state by then, and two steps show what stays allocated."""
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
        raise ValueError(f"steps contains {lowest}, but the first step is 0")
    return kept
