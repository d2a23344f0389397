"""Segments of two recordings beside each other: which only one of them has reserved at its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tb_memplugin.analysis.comparison import compared_devices
from tb_memplugin.analysis.segments import SegmentState, segments_at
from tb_memplugin.trace import MemoryTrace


@dataclass(frozen=True, slots=True)
class SegmentDelta:
    """A segment: the same address, bytes and stream on both sides, or on one of them.

    `base_live_bytes` and `other_live_bytes` are the requested bytes of its live blocks, None on a side that
    does not have the segment.
    """

    address: int
    bytes: int
    stream: str
    pool: str
    status: Literal["added", "removed", "same"]
    base_live_bytes: int | None
    other_live_bytes: int | None


@dataclass(frozen=True, slots=True)
class SegmentComparison:
    """The segments of one device at the end of two traces; a name is "" if a trace has no such device.

    The segments that are removed or the same sum to `base_reserved_bytes`, those added or the same to
    `other_reserved_bytes`. They are ordered by status (added, removed, same), the largest first.
    """

    device: str
    other_device: str
    base_reserved_bytes: int
    other_reserved_bytes: int
    segments: tuple[SegmentDelta, ...]


def compare_segments(
    base: MemoryTrace, other: MemoryTrace, device: str | None = None
) -> tuple[SegmentComparison, ...]:
    """Compare what two traces have reserved at their ends, device by device, paired as in `compare`.

    Args:
        base, other: any traces; one without segments has none to compare.
        device: the name of a device in both traces; default: all devices.

    Raises:
        NotRecordedError: one of the traces does not have the device, or neither has a device.
        UnreadableFileError: the segment events of a trace contradict each other.
    """
    return tuple(_compared(base, other, names) for names in compared_devices(base, other, device))


def _compared(base: MemoryTrace, other: MemoryTrace, names: tuple[str, str]) -> SegmentComparison:
    before, after = (
        {(segment.address, segment.bytes, segment.stream): segment for segment in _at_end(trace, name)}
        for trace, name in zip((base, other), names, strict=True)
    )
    deltas = [_delta(before.get(key), after.get(key)) for key in before | after]
    order = ("added", "removed", "same")
    return SegmentComparison(
        device=names[0],
        other_device=names[1],
        base_reserved_bytes=sum(segment.bytes for segment in before.values()),
        other_reserved_bytes=sum(segment.bytes for segment in after.values()),
        segments=tuple(
            sorted(deltas, key=lambda delta: (order.index(delta.status), -delta.bytes, delta.address))
        ),
    )


def _at_end(trace: MemoryTrace, name: str) -> tuple[SegmentState, ...]:
    return segments_at(trace, trace.device_row(name), len(trace.events) - 1) if name else ()


def _delta(before: SegmentState | None, after: SegmentState | None) -> SegmentDelta:
    segment = after or before
    assert segment is not None
    return SegmentDelta(
        address=segment.address,
        bytes=segment.bytes,
        stream=segment.stream,
        pool=segment.pool,
        status="same" if before and after else "added" if after else "removed",
        base_live_bytes=None if before is None else sum(block.bytes for block in before.blocks),
        other_live_bytes=None if after is None else sum(block.bytes for block in after.blocks),
    )
