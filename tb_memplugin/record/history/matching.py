"""Match the entries of an allocator's history with the events of a profile of the same time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tb_memplugin.trace import Events, Kind
from tb_memplugin.trace.tables import Bool, Int64

Rows = npt.NDArray[np.intp]

TOLERANCE_NS = 1_000_000
"""The largest difference between the two times of an event, after subtracting the clocks' constant offset.
Both clocks read the same processor counter, converted to wall time by two separate measurements."""

BLOCK = 512
"""The allocator's block sizes are multiples of this (kMinBlockSize)."""


@dataclass(frozen=True, slots=True)
class Match:
    """Pairs of rows: `profile[i]` and `snapshot[i]` are the same alloc or free.

    Attributes:
        profile: rows of the profile's events, ascending.
        snapshot: rows of the snapshot's events, same shape.
        missing: rows of the profile's events that the history does not contain.
        unseen: rows of the history's allocs and frees that the profile does not contain, because it sees
            only the profiled thread and the autograd threads.
        later_ns: nanoseconds to add to the history's times to get the profile's.
        out_of_order: how many pairs of allocs precede the pair before them in the history.
    """

    profile: Rows
    snapshot: Rows
    missing: Rows
    unseen: Rows
    later_ns: int
    out_of_order: int


def match_events(profile: Events, device: int, snapshot: Events, same_device: int) -> Match:
    """Pair the allocs and frees of one device that are in both a profile and a history.

    The allocator writes a history entry and reports to the profiler under one lock: an alloc after it is
    made, a free when it is requested (torch: c10/cuda/CUDACachingAllocator.cpp, `alloc_found_block` and
    `free`). So at each address both contain the same events in the same order. If the counts at an address
    agree, the events are paired in order. If not (another thread's events are only in the history), each
    is paired with the nearest in time, with the clocks' offset computed from the pairs already found.

    The two times of an event can be far apart if the system stopped the thread between them. Such a pair
    counts if it is between its neighbors on both sides. Frees that the profile tells without their address
    (`record/profiler/outside_tree.py`) are paired by size and time.

    Args:
        profile: events of a profile; frees are FREE_COMPLETED.
        device: the device's row in the profile.
        snapshot: events of a snapshot; frees are FREE_REQUESTED, or FREE_COMPLETED if no requests were
            recorded (`skip_actions`).
        same_device: the device's row in the snapshot.
    """
    profiled = _rows(profile, device, Kind.FREE_COMPLETED)
    asked = _rows(snapshot, same_device, Kind.FREE_REQUESTED)
    kept = asked if _has_frees(snapshot, asked) else _rows(snapshot, same_device, Kind.FREE_COMPLETED)
    group, same_group = _groups(profile, profiled, snapshot, kept)
    time, same_time = profile.time_ns[profiled], snapshot.time_ns[kept]
    partner = _by_position(group, same_group)
    sure = partner >= 0
    later = int(np.median(time[sure] - same_time[partner[sure]])) if sure.any() else 0
    far = sure & (np.abs(time - same_time[partner] - later) > TOLERANCE_NS) if len(kept) else sure
    partner[far & ~_in_order(partner, sure & ~far)] = -1
    _by_time(partner, group, time - later, same_group, same_time, ~sure)
    _guessed_frees(partner, profile, profiled, snapshot, kept, later)
    is_matched = partner >= 0
    unseen = np.ones(len(kept), bool)
    unseen[partner[is_matched]] = False
    return Match(
        profile=profiled[is_matched],
        snapshot=kept[partner[is_matched]],
        missing=profiled[~is_matched],
        unseen=kept[unseen],
        later_ns=later,
        out_of_order=int(
            np.count_nonzero(np.diff(partner[is_matched & (profile.kind[profiled] == Kind.ALLOC)]) < 0)
        ),
    )


def _guessed_frees(
    partner: Int64, profile: Events, profiled: Rows, snapshot: Events, kept: Rows, later: int
) -> None:
    """Pair frees that are left over on both sides by rounded size and time, whatever their addresses."""
    is_matched = np.zeros(len(kept), bool)
    is_matched[partner[partner >= 0]] = True
    rows = np.flatnonzero((partner < 0) & (profile.kind[profiled] != Kind.ALLOC))
    free = np.flatnonzero(~is_matched & (snapshot.kind[kept] != Kind.ALLOC))
    guessed = np.full(len(rows), -1, np.int64)
    _by_time(
        guessed,
        profile.bytes[profiled[rows]],
        profile.time_ns[profiled[rows]] - later,
        -(-snapshot.bytes[kept[free]] // BLOCK) * BLOCK,
        snapshot.time_ns[kept[free]],
        np.ones(len(rows), bool),
    )
    partner[rows[guessed >= 0]] = free[guessed[guessed >= 0]]


def _rows(events: Events, device: int, free: Kind) -> Rows:
    return np.flatnonzero((events.device == device) & ((events.kind == Kind.ALLOC) | (events.kind == free)))


def _has_frees(events: Events, rows: Rows) -> bool:
    return bool(np.any(events.kind[rows] == Kind.FREE_REQUESTED))


def _groups(profile: Events, profiled: Rows, snapshot: Events, kept: Rows) -> tuple[Int64, Int64]:
    """Return a number for each address and kind, the same for both sides."""
    address = np.concatenate((profile.address[profiled], snapshot.address[kept]))
    is_alloc = np.concatenate((profile.kind[profiled] == Kind.ALLOC, snapshot.kind[kept] == Kind.ALLOC))
    number = np.unique(address, return_inverse=True)[1]
    group = 2 * number.reshape(-1).astype(np.int64) + is_alloc
    return group[: len(profiled)], group[len(profiled) :]


def _by_position(group: Int64, same_group: Int64) -> Int64:
    """Return, for each row, the other side's row at the same position in a group of equal size, else -1."""
    partner = np.full(len(group), -1, np.int64)
    groups = 1 + int(max(group.max(initial=-1), same_group.max(initial=-1)))
    count, same_count = np.bincount(group, minlength=groups), np.bincount(same_group, minlength=groups)
    agrees = count == same_count
    order, same_order = np.argsort(group, kind="stable"), np.argsort(same_group, kind="stable")
    partner[order[agrees[group[order]]]] = same_order[agrees[same_group[same_order]]]
    return partner


def _in_order(partner: Int64, near: Bool) -> Bool:
    """Return the mask of rows whose partner is between those of the rows before and after that are near."""
    below = np.maximum.accumulate(np.where(near, partner, -1))
    above = np.minimum.accumulate(np.where(near, partner, np.iinfo(np.int64).max)[::-1])[::-1]
    ordered: Bool = (below < partner) & (partner < above)
    return ordered


def _by_time(
    partner: Int64, group: Int64, time: Int64, same_group: Int64, same_time: Int64, open_rows: Bool
) -> None:
    """Pair the open rows with the nearest row in time of the same group, each at most once, in place."""
    rows, free = np.flatnonzero(open_rows), np.flatnonzero(np.isin(same_group, group[open_rows]))
    if not len(rows) or not len(free):
        return
    order = free[np.lexsort((same_time[free], same_group[free]))]
    # A group and a rank in time fit into one 64-bit number; a group and a time in nanoseconds do not.
    moments = np.unique(np.concatenate((time[rows], same_time[order])))
    width = len(moments) + 1
    key = same_group[order] * width + np.searchsorted(moments, same_time[order])
    after = np.searchsorted(key, group[rows] * width + np.searchsorted(moments, time[rows]))
    best, distance = np.full(len(rows), -1, np.int64), np.full(len(rows), TOLERANCE_NS + 1, np.int64)
    for step in (after - 1, after):
        candidate = order[np.clip(step, 0, len(order) - 1)]
        inside = (step >= 0) & (step < len(order)) & (same_group[candidate] == group[rows])
        apart = np.where(inside, np.abs(same_time[candidate] - time[rows]), TOLERANCE_NS + 1)
        nearer = apart < distance
        best[nearer], distance[nearer] = candidate[nearer], apart[nearer]
    near = np.flatnonzero(best >= 0)
    near = near[np.lexsort((distance[near], best[near]))]
    first = np.append(True, np.diff(best[near]) != 0)[: len(near)]
    partner[rows[near[first]]] = best[near[first]]
