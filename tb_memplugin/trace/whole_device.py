"""What fills a whole device at one moment: PyTorch's bytes, those of others, and what is free."""

from __future__ import annotations

from dataclasses import dataclass

from tb_memplugin.trace.counters import Moment
from tb_memplugin.trace.kinds import KeyedEnum


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
        moment: when it was.
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
