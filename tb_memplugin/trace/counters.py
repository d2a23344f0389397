"""What counters other than the trace itself say of a device's live bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from tb_memplugin.trace.kinds import KeyedEnum


class Moment(KeyedEnum):
    """When a counter was read. The values are written to disk: append new ones, never renumber."""

    START = 0
    """Before the window's first event."""
    PEAK = 1
    """The highest value in the window, which need not be at the time of the trace's peak."""
    END = 2
    """After the window's last event."""


class Counter(KeyedEnum):
    """What counted. The values are written to disk: append new ones, never renumber."""

    OTHER = 0
    """A counter of a newer version."""
    ALLOCATED = 1
    """The allocator's counter of allocated bytes, rounded as it rounds them."""
    REQUESTED = 2
    """The allocator's counter of requested bytes."""
    CALLS = 3
    """Every allocation and free of the CPU's allocator on every thread, counted in its own calls."""
    SEEN = 4
    """None: known are only blocks that were seen in use or freed, but are not in the trace."""
    BLOCKS = 5
    """The blocks that the allocator lists."""
    SIMULATED = 6
    """None: the trace is simulated, and there is no allocator."""


class Cause(KeyedEnum):
    """Why the trace and a counter differ. The values are written to disk: append new ones, never renumber."""

    OTHER = 0
    """A cause of a newer version."""
    FREED_UNKNOWN = 1
    """Blocks from before the window that were freed in it, whose allocation was never seen."""
    NOT_TRACED = 2
    """Tensors seen in use, whose allocation was not seen."""
    UNSEEN = 3
    """Allocated or freed where the recorder does not see it: other threads, libraries."""
    STILL_COUNTED = 4
    """Counted as live, but freed where the recorder does not see it."""
    FOREIGN = 5
    """In memory that the allocator did not allocate (a file's, numpy's): no difference in what it counts."""


Code = TypeVar("Code", bound=KeyedEnum)


def code_of(kind: type[Code], number: int) -> Code:
    """Return the code with a number from a file; for those of newer versions the one that is 0."""
    return kind(number) if number in set(kind) else kind(0)


@dataclass(frozen=True, slots=True)
class CounterReading:
    """A counter's value for one device at one moment of a window.

    Attributes:
        device: a row of the trace's devices.
        moment: when it was read.
        counter: what counted.
        bytes: the live bytes by the counter, None for counters that only know `causes`.
        at_least: whether `bytes` is a lower bound.
        causes: (cause, bytes) of known differences from the trace, positive where the trace has fewer.
    """

    device: int
    moment: Moment
    counter: Counter
    bytes: int | None = None
    at_least: bool = False
    causes: tuple[tuple[Cause, int], ...] = ()


def at_every_moment(devices: int, counter: Counter) -> tuple[CounterReading, ...]:
    """Return readings without bytes, of each of the first `devices` devices at each moment."""
    return tuple(CounterReading(device, moment, counter) for device in range(devices) for moment in Moment)
