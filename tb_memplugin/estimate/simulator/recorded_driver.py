"""A driver that answers as a recording tells: the same addresses, and no memory where there was none."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tb_memplugin.estimate.simulator.driver import DeviceMemory, space_for
from tb_memplugin.trace import Kind


@dataclass(frozen=True, slots=True)
class Told:
    """A recorded change of the reserve."""

    kind: Kind
    address: int
    bytes: int


class RecordedDriver:
    """Answers from what was recorded between one request and the next: `upcoming`, in order.

    Memory is given where the record gives some next, and refused where it gives some back next, or where
    the request is one that `fails`. What the record does not have gets made-up addresses and is a surprise:
    `surprises` holds sentences; whoever reads them says when they came.

    Args:
        first_address: where made-up addresses begin, beyond all recorded ones.
        capacity: of the device, bytes, where it is known; memory is not refused for it.
    """

    def __init__(self, first_address: int, capacity: int | None = None) -> None:
        self.capacity = capacity
        self.upcoming: deque[Told] = deque()
        self.fails = False
        self.surprises: list[str] = []
        self._other = DeviceMemory(first_address=first_address)

    def allocate(self, size: int) -> int | None:
        """The recorded address of the next segment."""
        told = self._next(Kind.SEGMENT_ALLOC)
        if told is not None:
            if told.bytes != size:
                self.surprise(f"a segment of {size:,} bytes was made, recorded is one of {told.bytes:,}")
            return told.address
        if self._refuses():
            return None
        self.surprise(f"a segment of {size:,} bytes was made, recorded is none")
        return self._other.allocate(size)

    def free(self, address: int, size: int) -> None:
        """Compare a segment that is given back with the record."""
        self._given_back(Kind.SEGMENT_FREE, address, size)

    def reserve(self, page: int) -> tuple[int, int]:
        """The addresses from the next recorded map on."""
        space = space_for(self.capacity, page)
        if self.upcoming and self.upcoming[0].kind == Kind.SEGMENT_MAP:
            return self.upcoming[0].address, space
        return self._other.reserve(page)[0], space

    def map(self, address: int, size: int) -> bool:
        """Whether the record maps something next."""
        told = self._next(Kind.SEGMENT_MAP)
        if told is not None:
            if (told.address, told.bytes) != (address, size):
                self.surprise(
                    f"{size:,} bytes were mapped at {address:#x}, "
                    f"recorded are {told.bytes:,} at {told.address:#x}"
                )
            return True
        if self._refuses():
            return False
        self.surprise(f"{size:,} bytes were mapped at {address:#x}, recorded is nothing")
        return True

    def unmap(self, address: int, size: int) -> None:
        """Compare pages that are given back with the record."""
        self._given_back(Kind.SEGMENT_UNMAP, address, size)

    def gives_back_first(self) -> bool:
        """Whether the record gives memory back before anything else."""
        return bool(self.upcoming) and self.upcoming[0].kind in (Kind.SEGMENT_FREE, Kind.SEGMENT_UNMAP)

    def grows(self) -> bool:
        """Whether the record tells of new memory before the next request was served."""
        return any(told.kind in (Kind.SEGMENT_ALLOC, Kind.SEGMENT_MAP) for told in self.upcoming)

    def finish(self) -> None:
        """A request was served: what the record still tells of it did not happen here."""
        for told in self.upcoming:
            self.surprise(f"recorded is a {told.kind.name} of {told.bytes:,} bytes that did not happen")
        self.upcoming.clear()

    def surprise(self, what: str) -> None:
        """Note something that the record tells otherwise."""
        self.surprises.append(what)

    def _next(self, kind: Kind) -> Told | None:
        return self.upcoming.popleft() if self.upcoming and self.upcoming[0].kind == kind else None

    def _refuses(self) -> bool:
        return self.gives_back_first() or self.fails

    def _given_back(self, kind: Kind, address: int, size: int) -> None:
        told = Told(kind, address, size)
        if told in self.upcoming:
            self.upcoming.remove(told)
        else:
            self.surprise(f"{size:,} bytes at {address:#x} were given back, recorded is none of it")
