"""A simple allocator with the rules for one stream and default settings; it searches all blocks each time."""

from __future__ import annotations

from dataclasses import dataclass

M = 1 << 20


@dataclass
class Stretch:
    address: int
    size: int
    live: bool = False


class PlainAllocator:
    """An allocator whose segments are lists of stretches without gaps; addresses are as in `DeviceMemory`."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.segments: list[list[Stretch]] = []
        self.next = 0

    @property
    def reserved(self) -> int:
        return sum(stretch.size for segment in self.segments for stretch in segment)

    def malloc(self, requested: int) -> int | None:
        size = max(-(-requested // 512), 1) * 512
        small = size <= M
        fits = [
            (stretch.size, stretch.address, segment)
            for segment in self.segments
            if (sum(part.size for part in segment) == 2 * M) == small
            for stretch in segment
            if not stretch.live and stretch.size >= size
        ]
        if fits:
            _, address, segment = min(fits, key=lambda fit: fit[:2])
        else:
            new = 2 * M if small else 20 * M if size < 10 * M else -(-size // (2 * M)) * 2 * M
            if self.reserved + new > self.capacity:
                self.empty_cache()
            if self.reserved + new > self.capacity:
                return None
            address, segment = self.next, [Stretch(self.next, new)]
            self.segments.append(segment)
            self.next += new + 2 * M
        place = next(row for row, stretch in enumerate(segment) if stretch.address == address)
        rest = segment[place].size - size
        if rest >= 512 if small else rest > M:
            segment[place : place + 1] = [Stretch(address, size), Stretch(address + size, rest)]
        segment[place].live = True
        return address

    def free(self, address: int) -> None:
        for segment in self.segments:
            for stretch in segment:
                if stretch.address == address:
                    stretch.live = False
            joined: list[Stretch] = []
            for stretch in segment:
                if joined and not joined[-1].live and not stretch.live:
                    joined[-1].size += stretch.size
                else:
                    joined.append(stretch)
            segment[:] = joined

    def empty_cache(self) -> None:
        self.segments = [segment for segment in self.segments if any(part.live for part in segment)]
