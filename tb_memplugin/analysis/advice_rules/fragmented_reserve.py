"""Advice: free memory that a request cannot use, by what keeps it from being used."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tb_memplugin.analysis.allocator import knows_segments, levels
from tb_memplugin.analysis.block_origins import Judged
from tb_memplugin.analysis.findings import Evidence, Finding, Fine, NotJudged, Result, Where
from tb_memplugin.analysis.layout import Layout, Placement
from tb_memplugin.analysis.sums import sums
from tb_memplugin.analysis.units import size_text
from tb_memplugin.errors import MemPluginError
from tb_memplugin.simulator.allocator_settings import recorded_settings
from tb_memplugin.simulator.replay import replay
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.tables import Bool

LEAST_SHARE, LEAST_BYTES = 0.1, 64 << 20
"""Least share of the reserved memory, and least bytes, that must be free but not usable for a finding."""

LITTLE = 0.1
"""A segment is pinned by small blocks if its blocks take at most this share of it."""

MOST_EVENTS = 200_000
"""Longer recordings are not simulated: that takes a second per 100,000 events."""


@dataclass(frozen=True, slots=True)
class FreeKinds:
    """The free bytes in a device's segments by what keeps them from use, in bytes; they sum to all of them.

    `cached`: whole segments, which the allocator gives back before a request fails. `pinned`: in segments
    that small blocks keep. `streams`: in segments of another stream or pool than that of the request.
    `splits`: the rests between blocks of all other segments.
    """

    cached: int
    pinned: int
    streams: int
    splits: int

    @property
    def stuck(self) -> int:
        """All but the cached segments."""
        return self.pinned + self.streams + self.splits


def fragmented_reserve(judged: Judged) -> Result:
    """Divide what is free in partly used segments when the reserve reaches its highest, or a request fails.

    The moment is before the last segment was taken: no free block could serve that request. The finding's
    bytes are the free bytes of partly used segments, but at most the highest reserve minus the highest use:
    what is free only in between costs nothing.
    """
    trace, device = judged.trace, judged.device
    name = judged.name
    if not trace.devices[device].has_reserved:
        return Fine(f"The allocator of {name} keeps no segments.")
    if not knows_segments(trace, device):
        return NotJudged(f"The recording does not contain the segments of {name}.")
    event = _moment(trace, device)
    if event is None:
        return Fine("No segment was taken, and no request failed, while it was recorded.")
    placed = Placement(trace, device).at(event)
    reserved = int(placed.segments.bytes.sum())
    if reserved < int(trace.live(device)[event + 1]):
        return NotJudged("The recording contradicts itself: more was in use than reserved.")
    free = free_kinds(placed, _home(trace, event, placed))
    memory = levels(trace, device)
    most = reserved if memory.reserved is None else int(memory.reserved.max())
    cost = min(free.stuck, most - int(memory.active.max()))
    if cost < LEAST_BYTES or cost < LEAST_SHARE * most:
        return Fine(
            f"Of {size_text(reserved)} reserved, {size_text(free.stuck)} are free in partly used segments; "
            f"the highest reserve is {size_text(most - int(memory.active.max()))} above the highest use."
        )
    simulated = _simulated(trace, device, most)
    return Finding(
        kind="fragmentation",
        level="problem",
        device=name,
        step=trace.step_at(event).number,
        title=f"{name} has free memory in partly used segments while it takes new ones.",
        subject=name,
        bytes=cost,
        measure="free, but neither usable nor given back",
        of_bytes=most,
        evidence=(
            Evidence("pinned", free.pinned, f"in segments of which blocks take at most {LITTLE:.0%}", False),
            Evidence("streams", free.streams, "in segments of other streams or pools", False),
            Evidence("splits", free.splits, "between the blocks of all other segments", False),
            Evidence("cached segments", free.cached, "wholly free: given back before a request fails", False),
            *simulated,
        ),
        where=Where("allocator", (("step", str(trace.step_at(event).number)), ("event", str(event)))),
        what_to_do=_what_to_do(free, any(row.bytes <= most - cost // 2 for row in simulated)),
    )


def _moment(trace: MemoryTrace, device: int) -> int | None:
    """Return the last failed request, else what came before the highest reserve; None if it never rose."""
    failed = [oom.event for oom in trace.ooms if trace.events.device[oom.event] == device]
    if failed:
        return failed[-1]
    reserved = trace.reserved(device)
    if reserved is None or int(reserved.max()) == int(reserved[0]):
        return None
    return max(int(np.argmax(reserved)) - 2, -1)


def _home(trace: MemoryTrace, event: int, placed: Layout) -> Bool:
    """Return the mask of the segments of the request's stream and pool, or of the largest ones."""
    segments = placed.segments
    key = segments.stream.astype(np.int64) * (len(trace.pools) + 1) + segments.pool
    homes, home = np.unique(key, return_inverse=True)
    size = sums(home.astype(np.int64), segments.bytes, len(homes))
    most = homes[int(np.argmax(size))] if len(homes) else 0
    if any(oom.event == event for oom in trace.ooms):
        most = int(trace.events.stream[event]) * (len(trace.pools) + 1) + int(trace.events.pool[event])
        if most not in homes:
            return np.ones(len(segments), bool)
    is_home: Bool = key == most
    return is_home


def free_kinds(placed: Layout, home: Bool) -> FreeKinds:
    """Divide the free bytes of a layout.

    Args:
        home: the segments that the request can use; bool, shape (segments,).
    """
    count = len(placed.segments)
    used = sums(placed.segment, placed.extent, count)
    free = sums(placed.free_segment, placed.free_bytes, count)
    whole, pinned = used == 0, used <= LITTLE * placed.segments.bytes
    kinds = np.select([whole, ~home, pinned], [0, 2, 1], 3)
    cached, little, streams, splits = sums(kinds.astype(np.int64), free, 4).tolist()
    return FreeKinds(cached, little, streams, splits)


def _simulated(trace: MemoryTrace, device: int, reserved: int) -> list[Evidence]:
    """Return the reserve that the same requests need with expandable segments; [] if it is not simulated."""
    try:
        settings = recorded_settings(trace)
        if settings.expandable_segments or len(trace.events) > MOST_EVENTS:
            return []
        other = replay(trace, device, replace(settings, expandable_segments=True), recorded=False)
    except MemPluginError:
        return []
    detail = f"simulated: {size_text(max(reserved - other.reserved_peak, 0))} less than recorded"
    return [Evidence("reserve with expandable_segments:True", other.reserved_peak, detail, False)]


def _what_to_do(free: FreeKinds, expandable_helps: bool) -> str:
    setting = "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True. Or " if expandable_helps else ""
    if free.streams > max(free.pinned, free.splits):
        text = (
            "memory that one stream freed does not serve another: use fewer streams, or allocate on one of "
            "them and call tensor.record_stream() for the others."
        )
    elif free.pinned >= free.splits:
        text = (
            "allocate what lives long (state, caches, metrics) before the first large batch, so that it does "
            "not keep that batch's segments."
        )
    else:
        text = "pad inputs to a few fixed sizes, so that freed blocks fit the next requests."
    return setting + (text if setting else text[0].upper() + text[1:])
