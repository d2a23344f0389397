"""The layer below the caching allocator: cudaMalloc, cudaFree and mapped pages, simulated or as recorded."""

from __future__ import annotations

from collections import deque
from collections.abc import Set
from dataclasses import dataclass
from itertools import takewhile

from tb_memplugin.trace import Kind
from tb_memplugin.trace.kinds import GROWS, SHRINKS

FIRST_ADDRESS = 0x7F00_0000_0000
GAP = 2 << 20
"""Bytes between simulated segments, so that no two of them are adjacent."""

WIDE = 1 << 40
"""Address space of an expandable segment if the device's capacity is not known, in bytes."""


def space_for(capacity: int | None, page: int) -> int:
    """Return the address space of an expandable segment in PyTorch: 1 1/8 of the device, in whole pages."""
    wanted = WIDE if capacity is None else capacity + capacity // 8
    return -(-wanted // page) * page


class DeviceMemory:
    """A simulated device with or without a limited capacity; no address is used twice.

    It decides the addresses of segments, and when memory runs out.

    Args:
        capacity: total bytes that the allocator can get; None for no limit.
    """

    def __init__(self, capacity: int | None = None, first_address: int = FIRST_ADDRESS) -> None:
        self.capacity = capacity
        self.used = 0
        self._free_address = first_address

    def allocate(self, size: int) -> int | None:
        """Allocate a segment and return its address; None if there is no memory for it."""
        return self._address_for(size) if self.map(0, size) else None

    def free(self, address: int, size: int) -> None:  # noqa: ARG002  # `RecordedDriver` reads it
        """Free a segment."""
        self.used -= size

    def reserve(self, page: int) -> tuple[int, int]:
        """Reserve address space for an expandable segment; return its first address and its size in bytes."""
        space = space_for(self.capacity, page)
        return self._address_for(space), space

    def map(self, address: int, size: int) -> bool:  # noqa: ARG002  # `RecordedDriver` reads it
        """Take memory for a range of reserved addresses; return False if there is none."""
        if self.capacity is not None and self.used + size > self.capacity:
            return False
        self.used += size
        return True

    def unmap(self, address: int, size: int) -> None:  # noqa: ARG002  # `RecordedDriver` reads it
        """Unmap the memory of a range of reserved addresses."""
        self.used -= size

    def _address_for(self, size: int) -> int:
        address = self._free_address
        self._free_address += -(-size // GAP) * GAP + GAP
        return address


@dataclass(frozen=True, slots=True)
class RecordedChange:
    """A recorded change of the reserved memory."""

    kind: Kind
    address: int
    bytes: int


class RecordedDriver(DeviceMemory):
    """A device that answers from `upcoming`: the changes recorded between one request and the next, in order.

    It provides memory if the next recorded change does. It refuses memory if the next recorded change frees
    some, or if the request is known to fail (`fails`); its capacity does not limit memory. A change that the
    recording does not have gets made-up addresses and adds a sentence to `surprises`; the reader of these
    adds the time.

    Args:
        first_address: the first made-up address, beyond all recorded ones.
    """

    def __init__(self, capacity: int | None, first_address: int) -> None:
        super().__init__(capacity, first_address)
        self.upcoming: deque[RecordedChange] = deque()
        self.fails = False
        self.surprises: list[str] = []

    def allocate(self, size: int) -> int | None:
        """Return the recorded address of the next segment; None if the recording refused it."""
        change = self._next(Kind.SEGMENT_ALLOC)
        if change is not None:
            if change.bytes != size:
                self.surprises.append(
                    f"the simulation made a segment of {size:,} bytes, the recording has one of "
                    f"{change.bytes:,}"
                )
            return change.address
        if self._refuses():
            return None
        self.surprises.append(f"the simulation made a segment of {size:,} bytes, the recording has none")
        return self._address_for(size)

    def free(self, address: int, size: int) -> None:
        """Compare a segment that is freed with the recording."""
        self._match_free(Kind.SEGMENT_FREE, address, size)

    def reserve(self, page: int) -> tuple[int, int]:
        """Reserve the addresses that begin at the next recorded mapping."""
        if self.upcoming and self.upcoming[0].kind == Kind.SEGMENT_MAP:
            return self.upcoming[0].address, space_for(self.capacity, page)
        return super().reserve(page)

    def map(self, address: int, size: int) -> bool:
        """Return True if memory is mapped next in the recording, or was not refused there."""
        change = self._next(Kind.SEGMENT_MAP)
        if change is not None:
            if (change.address, change.bytes) != (address, size):
                self.surprises.append(
                    f"the simulation mapped {size:,} bytes at {address:#x}, the recording "
                    f"{change.bytes:,} at {change.address:#x}"
                )
            return True
        if self._refuses():
            return False
        self.surprises.append(f"the simulation mapped {size:,} bytes at {address:#x}, the recording nothing")
        return True

    def unmap(self, address: int, size: int) -> None:
        """Compare pages that are unmapped with the recording."""
        self._match_free(Kind.SEGMENT_UNMAP, address, size)

    def frees_first(self) -> bool:
        """Return whether the next recorded change frees memory."""
        return bool(self.upcoming) and self.upcoming[0].kind in SHRINKS

    def collected(self, unused: Set[int]) -> list[int]:
        """Return the segments that garbage collection freed, of the unused ones, by address.

        Nobody recorded how much memory it left to the process. But an emptied cache and a request that finds
        no memory free all unused segments; only garbage collection frees some and keeps the others.
        """
        frees = takewhile(lambda change: change.kind == Kind.SEGMENT_FREE, self.upcoming)
        freed = [change.address for change in frees]
        return freed if set(freed) < unused else []

    def grows(self) -> bool:
        """Return whether the recording allocates or maps memory before the next request."""
        return any(change.kind in GROWS for change in self.upcoming)

    def finish(self) -> None:
        """End a request: note the recorded changes that did not happen here, and clear them."""
        for change in self.upcoming:
            self.surprises.append(
                f"the recording has a {change.kind.name} of {change.bytes:,} bytes that did not happen"
            )
        self.upcoming.clear()

    def _next(self, kind: Kind) -> RecordedChange | None:
        return self.upcoming.popleft() if self.upcoming and self.upcoming[0].kind == kind else None

    def _refuses(self) -> bool:
        return self.frees_first() or self.fails

    def _match_free(self, kind: Kind, address: int, size: int) -> None:
        change = RecordedChange(kind, address, size)
        if change in self.upcoming:
            self.upcoming.remove(change)
        else:
            self.surprises.append(
                f"the simulation released {size:,} bytes at {address:#x}, the recording did not"
            )
