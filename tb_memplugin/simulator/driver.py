"""The layer below the caching allocator: cudaMalloc and cudaFree, and mapping and unmapping of pages."""

from __future__ import annotations

from typing import Protocol

FIRST_ADDRESS = 0x7F00_0000_0000
GAP = 2 << 20
"""Bytes between simulated segments, so that no two of them are adjacent."""

WIDE = 1 << 40
"""Address space of an expandable segment if the device's capacity is not known, in bytes."""


class Driver(Protocol):
    """Allocates and frees device memory; it decides the addresses, and when memory runs out.

    `capacity` is the device's memory in bytes, None if not known.
    """

    capacity: int | None

    def allocate(self, size: int) -> int | None:
        """Allocate a segment and return its address; None if there is no memory for it."""

    def free(self, address: int, size: int) -> None:
        """Free a segment."""

    def reserve(self, page: int) -> tuple[int, int]:
        """Reserve address space for an expandable segment; return its first address and its size in bytes."""

    def map(self, address: int, size: int) -> bool:
        """Map memory to a range of reserved addresses; return False if there is none."""

    def unmap(self, address: int, size: int) -> None:
        """Unmap the memory of a range of reserved addresses."""


def space_for(capacity: int | None, page: int) -> int:
    """Return the address space of an expandable segment in PyTorch: 1 1/8 of the device, in whole pages."""
    wanted = WIDE if capacity is None else capacity + capacity // 8
    return -(-wanted // page) * page


class DeviceMemory:
    """A simulated device with or without a limited capacity; no address is used twice.

    Args:
        capacity: total bytes that the allocator can get; None for no limit.
        first_address: the address of the first segment.
    """

    def __init__(self, capacity: int | None = None, first_address: int = FIRST_ADDRESS) -> None:
        self.capacity = capacity
        self.used = 0
        self._next = first_address

    def allocate(self, size: int) -> int | None:
        """Allocate a segment and return its address; None if there is no memory for it."""
        if not self.map(0, size):
            return None
        return self._address_for(size)

    def free(self, address: int, size: int) -> None:  # noqa: ARG002  # as in `Driver`
        """Free a segment."""
        self.used -= size

    def reserve(self, page: int) -> tuple[int, int]:
        """Reserve address space for an expandable segment; return its first address and its size in bytes."""
        space = space_for(self.capacity, page)
        return self._address_for(space), space

    def map(self, address: int, size: int) -> bool:  # noqa: ARG002  # as in `Driver`
        """Take memory for a range of reserved addresses; return False if there is none."""
        if self.capacity is not None and self.used + size > self.capacity:
            return False
        self.used += size
        return True

    def unmap(self, address: int, size: int) -> None:  # noqa: ARG002  # as in `Driver`
        """Unmap the memory of a range of reserved addresses."""
        self.used -= size

    def _address_for(self, size: int) -> int:
        address = self._next
        self._next += -(-size // GAP) * GAP + GAP
        return address
