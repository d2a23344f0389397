"""What lies below the caching allocator: cudaMalloc and cudaFree, and pages that are mapped and unmapped."""

from __future__ import annotations

from typing import Protocol

FIRST_ADDRESS = 0x7F00_0000_0000
GAP = 2 << 20
"""Between made-up segments, so that no two of them touch."""

WIDE = 1 << 40
"""Address space of a segment that expands, where the device's capacity is not known, bytes."""


class Driver(Protocol):
    """Gives memory and takes it back. What address it gives, and when it has no more, is its own affair.

    `capacity` is the device's memory in bytes, None if not known.
    """

    capacity: int | None

    def allocate(self, size: int) -> int | None:
        """The address of a new segment, None if there is no memory for it."""

    def free(self, address: int, size: int) -> None:  # as in `Driver`
        """Take a segment back."""

    def reserve(self, page: int) -> tuple[int, int]:
        """Address space for a segment that expands in pages: where it begins, and bytes."""

    def map(self, address: int, size: int) -> bool:  # as in `Driver`
        """Put memory behind a stretch of reserved addresses; False if there is none."""

    def unmap(self, address: int, size: int) -> None:  # as in `Driver`
        """Take the memory behind a stretch back."""


def space_for(capacity: int | None, page: int) -> int:
    """Address space that PyTorch reserves for an expandable segment: 1 1/8 of the device, in whole pages."""
    wanted = WIDE if capacity is None else capacity + capacity // 8
    return -(-wanted // page) * page


class DeviceMemory:
    """A device of a capacity, or of none, with made-up addresses that are never used twice.

    Args:
        capacity: bytes that the allocator can get in all; None for no limit.
        held: bytes of it that are taken already.
        first_address: where made-up addresses begin.
    """

    def __init__(
        self, capacity: int | None = None, held: int = 0, first_address: int = FIRST_ADDRESS
    ) -> None:
        self.capacity = capacity
        self.held = held
        self._next = first_address

    def allocate(self, size: int) -> int | None:
        """The address of a new segment, None if there is no memory for it."""
        if not self.map(0, size):
            return None
        return self._place(size)

    def free(self, address: int, size: int) -> None:  # noqa: ARG002  # as in `Driver`
        """Take a segment back."""
        self.held -= size

    def reserve(self, page: int) -> tuple[int, int]:
        """Address space for a segment that expands."""
        space = space_for(self.capacity, page)
        return self._place(space), space

    def map(self, address: int, size: int) -> bool:  # noqa: ARG002  # as in `Driver`
        """Whether there is memory for a stretch; it is taken."""
        if self.capacity is not None and self.held + size > self.capacity:
            return False
        self.held += size
        return True

    def unmap(self, address: int, size: int) -> None:  # noqa: ARG002  # as in `Driver`
        """Take the memory behind a stretch back."""
        self.held -= size

    def _place(self, size: int) -> int:
        address = self._next
        self._next += -(-size // GAP) * GAP + GAP
        return address
