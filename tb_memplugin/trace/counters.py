"""What counters other than the trace itself say of a device: its live bytes, and what fills it."""

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


class DevicePart(KeyedEnum):
    """A part of a device's memory. The values are written to disk: append new ones, never renumber."""

    UNKNOWN = 0
    """In use, and not known by whom; also a part that a newer version knows."""
    REQUESTED = 1
    """Allocated by PyTorch, as requested."""
    ROUNDING = 2
    """What PyTorch's allocator adds to requests by rounding."""
    ALLOCATED = 3
    """Allocated by PyTorch; the bytes that rounding adds may be in it."""
    CACHED = 4
    """Reserved by PyTorch's allocator, but not allocated."""
    PRIVATE_POOLS = 5
    """Reserved by PyTorch's allocator in private pools, of CUDA graphs and of the user, but not allocated."""
    CONTEXT = 6
    """What this process had outside PyTorch's allocator at the first reading: CUDA's context, libraries."""
    OUTSIDE = 7
    """What came to that since: NCCL, CUDA graphs, modules of libraries."""
    OTHER_PROCESSES = 8
    DRIVER = 9
    """Reserved by the driver and the firmware."""
    FREE = 10
    RESIDENT = 11
    """Of this process, files that it maps included (VmRSS, VmHWM)."""
    PROCESS = 12
    """Of this process, without mapped files; pages that its children share are in it."""
    CHILDREN = 13
    """Of the processes below this one: the pages that each has alone."""
    FILES = 14
    """Files in memory: mapped libraries and data, and the page cache."""


@dataclass(frozen=True, slots=True)
class WholeDevice:
    """What fills a whole device at one moment of a window; for the CPU, the machine or the cgroup's limit.

    Attributes:
        device: a row of the trace's devices.
        read_at: when what is not PyTorch's was read: `moment`, or the nearest reading.
        parts: (part, bytes), each once. `UNKNOWN` is negative where readings, which are not of one instant,
            count bytes twice.
        is_limit: whether the whole is a limit (of a cgroup) and not all that there is.
    """

    device: int
    moment: Moment
    read_at: Moment
    parts: tuple[tuple[DevicePart, int], ...]
    is_limit: bool = False

    @property
    def total(self) -> int:
        """The whole in bytes: the sum of the parts."""
        return sum(size for _, size in self.parts)


def parts_of(total: int, sizes: dict[DevicePart, int]) -> tuple[tuple[DevicePart, int], ...]:
    """Return the parts of a whole: the known ones but empty ones, what they leave, and what is free.

    Args:
        total: bytes of the whole.
        sizes: bytes of the parts that are known.
    """
    rest = total - sum(sizes.values())
    free = [(DevicePart.FREE, sizes[DevicePart.FREE])] if DevicePart.FREE in sizes else []
    used = [(part, size) for part, size in sorted(sizes.items()) if size and part is not DevicePart.FREE]
    return (*used, *([(DevicePart.UNKNOWN, rest)] if rest else []), *free)
