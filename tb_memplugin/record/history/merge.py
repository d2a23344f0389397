"""Merge a profile and the allocator's history of the same window into one trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from tb_memplugin.analysis.units import counted
from tb_memplugin.read.faults import Tally, notes_on
from tb_memplugin.trace import (
    Annotations,
    Counter,
    CounterReading,
    Device,
    Events,
    Kind,
    MemoryTrace,
    Module,
    Note,
    OutOfMemory,
    Segments,
    StartState,
)
from tb_memplugin.trace.tables import EVENT_DTYPES, MODULE_MARK, START_DTYPES, Bool, Int64

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
    (`record/profiler/memory_events.py`) are paired by size and time.

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


MOST_MISSING = 0.1
"""If a larger share of a device's profiled events is not in its history, the two are not merged."""

HISTORY = " (allocator history)"
"""Suffix of a device's name if its history is kept separately from its profile."""

SOURCE = "torch.profiler and allocator history"

Key = TypeVar("Key")


def merge_snapshot(profile_trace: MemoryTrace, snapshot_trace: MemoryTrace) -> MemoryTrace:
    """Return one trace with what the profiler saw and what the allocator recorded meanwhile.

    A device in both has the snapshot's events: requested bytes, requested and completed frees, segments,
    stacks, streams, pools, annotations, out-of-memory entries, and the exact start state. Allocs that are
    also in the profile get from it the module, operator, category and its reason, phase, label and time,
    stacks if the history has none, and `rounded`, because the profiler reports rounded block sizes and the
    history requested ones (torch: c10/cuda/CUDACachingAllocator.cpp). Steps, phases and calls are those of
    the profile. Notes count contradictions, and events that only one of the two contains.

    If a device's history does not reach back to the profile's first event there, or more than
    `MOST_MISSING` of the profile's events are not in it, both are kept: the profile unchanged, and the
    history as a separate device with the suffix `HISTORY`; a note gives the reason.

    Args:
        profile_trace: a trace from torch.profiler, without segments. The snapshot's annotations replace its
            own.
        snapshot_trace: a trace of the same process, with only the entries from the profiled window.
    """
    pairs = [_pair(profile_trace, snapshot_trace, row) for row in range(len(snapshot_trace.devices))]
    return _Merger(profile_trace, snapshot_trace, pairs).merged()


@dataclass(frozen=True, slots=True)
class _Pair:
    """A device of the snapshot: its row there and in the profile (-1: none), and the match of both."""

    row: int
    profiled: int
    match: Match
    reason: str = ""
    """Why the two cannot be merged; empty if they can."""

    @property
    def is_merged(self) -> bool:
        return self.profiled >= 0 and not self.reason


def _pair(profile: MemoryTrace, snapshot: MemoryTrace, row: int) -> _Pair:
    names = [device.name for device in profile.devices]
    name = snapshot.devices[row].name
    profiled = names.index(name) if name in names else -1
    match = match_events(profile.events, profiled, snapshot.events, row)
    missing, total = len(match.missing), len(match.missing) + len(match.profile)
    reason = ""
    if missing > MOST_MISSING * total:
        reason = f"{missing:,} of {total:,} profiled events are not in it"
    elif missing and match.missing[0] < match.profile[0] and not _goes_back(profile, snapshot, row, match):
        reason = "it does not go back to the first profiled event (its oldest entries were overwritten)"
    return _Pair(row, profiled, match, reason)


def _goes_back(profile: MemoryTrace, snapshot: MemoryTrace, row: int, match: Match) -> bool:
    """Whether the history begins before the first profiled event, which it does not contain."""
    times = snapshot.events.time_ns[snapshot.events.device == row]
    first = profile.events.time_ns[match.missing[0]]
    return bool(len(times) and times[0] + match.later_ns <= first)


class _Merger:
    """Concatenates the columns of both traces: rows kept from the profile, then all of the snapshot's."""

    def __init__(self, profile: MemoryTrace, snapshot: MemoryTrace, pairs: Sequence[_Pair]) -> None:
        self.profile, self.snapshot, self.pairs = profile, snapshot, pairs
        replaced = [pair.profiled for pair in pairs if pair.is_merged]
        self.kept = np.flatnonzero(~np.isin(profile.events.device, replaced))
        self.kept_start = np.flatnonzero(~np.isin(profile.start.device, replaced))
        self.devices, self.device_of = self._devices()
        keys = [module.key for module in profile.modules]
        _, self.module_of = _table(keys, [module.key for module in snapshot.modules])
        self.labels, self.label_of = _labels(profile.labels, snapshot.labels)
        self.notes: list[Note] = []

    def merged(self) -> MemoryTrace:
        stacks, stack_of = _table(self.profile.stacks, self.snapshot.stacks)
        operators, operator_of = _table(self.profile.operators, self.snapshot.operators)
        tensors, tensor_of = _table(self.profile.tensors, self.snapshot.tensors)
        rows_of = {
            "device": self.device_of,
            "module": self.module_of,
            "label": self.label_of,
            "stack": stack_of,
            "forward": stack_of,
            "operator": operator_of,
            "tensor": tensor_of,
        }
        events, event_of = self._events(rows_of)
        return replace(
            self.profile,
            source=SOURCE,
            events=events,
            start=self._start(rows_of),
            devices=self.devices,
            operators=operators,
            modules=self._modules(),
            labels=self.labels,
            stacks=stacks,
            tensors=tensors,
            segments=_moved(self.snapshot.segments, self.device_of),
            annotations=self._annotations(event_of),
            annotation_names=self.snapshot.annotation_names,
            streams=self.snapshot.streams,
            pools=self.snapshot.pools,
            contexts=self.snapshot.contexts,
            ooms=tuple(self._ooms(event_of)),
            counters=tuple(self._counters()),
            notes=(*self.profile.notes, *self.snapshot.notes, *self._pair_notes(), *self.notes),
            properties={**self.snapshot.properties, **self.profile.properties},
        )

    def _devices(self) -> tuple[tuple[Device, ...], Int64]:
        """Return the table of devices, and the row in it of each device of the snapshot."""
        devices, rows = list(self.profile.devices), []
        for pair in self.pairs:
            device = self.snapshot.devices[pair.row]
            if pair.is_merged:
                rows.append(pair.profiled)
                devices[pair.profiled] = replace(
                    devices[pair.profiled], reserved_at_start=device.reserved_at_start
                )
            else:
                rows.append(len(devices))
                devices.append(replace(device, name=device.name + HISTORY) if pair.reason else device)
        return tuple(devices), np.array([*rows, -1], np.int64)

    def _counters(self) -> Iterator[CounterReading]:
        """Yield the readings of both; merged devices have requested bytes, which only some counters count."""
        merged = {pair.profiled for pair in self.pairs if pair.is_merged}
        for reading in self.profile.counters:
            if reading.device not in merged or reading.counter is Counter.REQUESTED:
                yield reading
        for reading in self.snapshot.counters:
            yield replace(reading, device=int(self.device_of[reading.device]))

    def _modules(self) -> tuple[Module, ...]:
        modules = list(self.profile.modules)
        for row, module in zip(self.module_of.tolist(), self.snapshot.modules, strict=False):
            if row >= len(modules):
                modules.append(replace(module, parent=int(self.module_of[module.parent])))
        return tuple(modules)

    def _events(self, rows_of: dict[str, Int64]) -> tuple[Events, Int64]:
        """Return all events in time order, and the index among them of each event of the snapshot."""
        columns = _columns(self.snapshot.events, EVENT_DTYPES, rows_of)
        for pair in self.pairs:
            if pair.is_merged:
                self._attribute(columns, pair)
            self._set_times(columns, pair)
        kept = {name: getattr(self.profile.events, name)[self.kept] for name in EVENT_DTYPES}
        both = {name: np.concatenate((kept[name], columns[name])) for name in EVENT_DTYPES}
        order = np.argsort(both["time_ns"], kind="stable")
        event_of = np.empty(len(order), np.int64)
        event_of[order] = np.arange(len(order))
        return Events(**{name: column[order] for name, column in both.items()}), event_of[len(self.kept) :]

    def _attribute(self, columns: dict[str, np.ndarray], pair: _Pair) -> None:
        """Set the profile's attribution on the snapshot's allocs, in place."""
        events = self.profile.events
        is_alloc = events.kind[pair.match.profile] == Kind.ALLOC
        mine, theirs = pair.match.profile[is_alloc], pair.match.snapshot[is_alloc]
        self._check(columns, pair, mine, theirs)
        for name in ("operator", "phase", "category", "reason"):
            columns[name][theirs] = getattr(events, name)[mine]
        rounded = columns["rounded"][theirs]
        columns["rounded"][theirs] = np.where(rounded >= 0, rounded, events.bytes[mine])
        for name in ("stack", "forward"):  # the profile has only Python frames, used if the history has none
            recorded = columns[name][theirs]
            columns[name][theirs] = np.where(recorded >= 0, recorded, getattr(events, name)[mine])
        for name in ("label", "tensor"):
            profiled = getattr(events, name)[mine]
            columns[name][theirs] = np.where(profiled >= 0, profiled, columns[name][theirs])
        module = events.module[mine]
        marked = self._is_module(columns["module"][theirs]) & ~self._is_module(module)
        columns["module"][theirs] = np.where(marked, columns["module"][theirs], module)

    def _check(self, columns: dict[str, np.ndarray], pair: _Pair, mine: Int64, theirs: Int64) -> None:
        """Count differences between the two for the same alloc."""
        counted, rounded = self.profile.events.bytes[mine], columns["rounded"][theirs]
        module, marked = self.profile.events.module[mine], columns["module"][theirs]
        both = self._is_module(module) & self._is_module(marked)
        faults = {
            "allocs request more than the profiler counts for their block": counted
            < columns["bytes"][theirs],
            "allocs have another rounded size in the history; the history's size is used": (rounded >= 0)
            & (rounded != counted),
            "allocs have another module in the history than in the profile; the profile's module is "
            "used": both & (module != marked),
        }
        for fault, wrong in faults.items():
            for note in notes_on({fault: Tally.of(wrong, columns["bytes"][theirs])}):
                self._note(pair, note)

    def _set_times(self, columns: dict[str, np.ndarray], pair: _Pair) -> None:
        """Convert the times of a device's history to the profile's clock, keeping the order of its entries.

        The history's clock has microseconds. Entries that are not in the profile (such as completed frees)
        never move those that are: their time is at most that of the next entry in the profile.
        """
        time, here = columns["time_ns"], np.flatnonzero(self.snapshot.events.device == pair.row)
        if pair.is_merged:
            time[here] += pair.match.later_ns
            both = np.sort(pair.match.snapshot)
            latest = np.full(len(time), np.iinfo(np.int64).max)
            time[pair.match.snapshot] = self.profile.events.time_ns[pair.match.profile]
            latest[both] = np.maximum.accumulate(time[both])
            time[here] = np.minimum(time[here], np.minimum.accumulate(latest[here][::-1])[::-1])
        time[here] = np.maximum.accumulate(time[here])

    def _start(self, rows_of: dict[str, Int64]) -> StartState:
        columns = _columns(self.snapshot.start, START_DTYPES, rows_of)
        for pair in self.pairs:
            if pair.is_merged:
                self._name_start(columns, pair)
                self._round_start(columns, pair)
        kept = {name: getattr(self.profile.start, name)[self.kept_start] for name in START_DTYPES}
        return StartState(**{name: np.concatenate((kept[name], columns[name])) for name in START_DTYPES})

    def _name_start(self, columns: dict[str, np.ndarray], pair: _Pair) -> None:
        """Set the owners of blocks alive at the start, by address, in place."""
        start = self.profile.start
        rows = np.flatnonzero((start.device == pair.profiled) & (start.address != 0))
        here = np.flatnonzero(self.snapshot.start.device == pair.row)
        _, mine, theirs = np.intersect1d(start.address[rows], columns["address"][here], return_indices=True)
        for name in ("category", "reason", "module", "label", "tensor"):
            columns[name][here[theirs]] = getattr(start, name)[rows[mine]]
        lost = np.setdiff1d(rows, rows[mine])
        if len(lost):
            size = int(start.bytes[lost].sum())
            self._note(
                pair,
                Note(
                    "Left out, because the allocator's history does not have it: "
                    f"{counted(len(lost), 'block')} ({size:,} bytes) alive at the start of the profile.",
                    "not_in_history",
                    size,
                ),
            )

    def _round_start(self, columns: dict[str, np.ndarray], pair: _Pair) -> None:
        """Set the rounded sizes of start blocks that were freed in the window, from the profiler's counts."""
        here = np.flatnonzero(self.snapshot.start.device == pair.row)
        touched = np.sort(np.concatenate((pair.match.snapshot, pair.match.unseen)))
        address, first = np.unique(self.snapshot.events.address[touched], return_index=True)
        counted = np.full(len(self.snapshot.events), -1, np.int64)
        frees = self.profile.events.kind[pair.match.profile] != Kind.ALLOC
        freed = pair.match.snapshot[frees]
        counted[freed] = self.profile.events.bytes[pair.match.profile[frees]]
        _, mine, ended = np.intersect1d(columns["address"][here], address, return_indices=True)
        size = counted[touched[first[ended]]]
        open_rows = (size >= 0) & (columns["rounded"][here[mine]] < 0)
        columns["rounded"][here[mine[open_rows]]] = size[open_rows]

    def _annotations(self, event_of: Int64) -> Annotations:
        annotations = self.snapshot.annotations
        later = np.array([pair.match.later_ns if pair.is_merged else 0 for pair in self.pairs], np.int64)
        time = annotations.time_ns + later[annotations.device] if len(annotations) else annotations.time_ns
        order = np.argsort(time, kind="stable")
        event = np.append(event_of, -1)[annotations.event]  # -1 takes the last
        return Annotations(
            time_ns=time[order],
            name=annotations.name[order],
            ends=annotations.ends[order],
            device=self.device_of[annotations.device][order].astype(np.uint8),
            event=event[order],
        )

    def _ooms(self, event_of: Int64) -> Iterator[OutOfMemory]:
        yield from (replace(oom, event=int(event_of[oom.event])) for oom in self.snapshot.ooms)

    def _pair_notes(self) -> Iterator[Note]:
        """Yield notes on how each device's two records fit together."""
        for pair in self.pairs:
            name, match = self.snapshot.devices[pair.row].name, pair.match
            if pair.reason:
                yield Note(
                    f"{name}: the allocator's history could not be joined with the profile: "
                    f"{pair.reason}. It lacks {self._missing_bytes(pair):,} bytes of profiled events. Both "
                    f"are kept; the history is shown as the device {name + HISTORY!r}.",
                    "history_not_joined",
                    self._missing_bytes(pair),
                    device=name,
                )
            elif pair.is_merged:
                if len(match.missing):
                    yield Note(
                        f"{name}: {len(match.missing):,} profiled events ({self._missing_bytes(pair):,} "
                        "bytes) are not in the allocator's history.",
                        "not_in_history",
                        self._missing_bytes(pair),
                        device=name,
                    )
                if len(match.unseen):
                    yield Note(
                        f"{name}: {len(match.unseen):,} allocs and frees "
                        f"({int(self.snapshot.events.bytes[match.unseen].sum()):,} bytes) are only in the "
                        "allocator's history: other threads made them, or they are outside the profiled "
                        "steps.",
                        "only_in_history",
                        int(self.snapshot.events.bytes[match.unseen].sum()),
                        device=name,
                    )
                if match.out_of_order:
                    allocated = match.profile[self.profile.events.kind[match.profile] == Kind.ALLOC]
                    size = int(self.profile.events.bytes[allocated].sum())
                    yield Note(
                        f"{name}: {match.out_of_order:,} events, among allocs of {size:,} bytes, have "
                        "another order in its history.",
                        "out_of_order",
                        size,
                        device=name,
                    )

    def _missing_bytes(self, pair: _Pair) -> int:
        """Return the bytes of the profiled events that are not in a device's history."""
        return int(self.profile.events.bytes[pair.match.missing].sum())

    def _note(self, pair: _Pair, note: Note) -> None:
        self.notes.append(note.of(self.snapshot.devices[pair.row].name))

    def _is_module(self, rows: np.ndarray) -> npt.NDArray[np.bool_]:
        by_row = np.array([module.is_module for module in self._modules()] + [False])
        is_module: npt.NDArray[np.bool_] = by_row[rows]
        return is_module


def _table(first: Sequence[Key], second: Sequence[Key]) -> tuple[tuple[Key, ...], Int64]:
    """Return the keys of both, those of `first` at their rows, and the row of each key of `second`.

    The rows have an additional last entry, -1, so that row -1 stays -1.
    """
    rows = {key: row for row, key in reversed(list(enumerate(first)))}
    added: list[Key] = []
    for key in second:
        if key not in rows:
            rows[key] = len(first) + len(added)
            added.append(key)
    return (*first, *added), np.array([*(rows[key] for key in second), -1], np.int64)


def _labels(first: Sequence[str], second: Sequence[str]) -> tuple[tuple[str, ...], Int64]:
    """Like `_table`, but without labels that are module marks: the events have the modules themselves."""
    kept = [label for label in second if not label.startswith(MODULE_MARK)]
    labels, rows = _table(first, kept)
    row_of = dict(zip(kept, rows.tolist(), strict=False))
    return labels, np.array([*(row_of.get(label, -1) for label in second), -1], np.int64)


def _columns(
    table: Events | StartState, dtypes: dict[str, np.dtype[np.generic]], rows_of: dict[str, Int64]
) -> dict[str, np.ndarray]:
    """Return copies of a table's columns, with rows of other tables converted to the merged ones."""
    columns = {}
    for name, dtype in dtypes.items():
        column = getattr(table, name)
        columns[name] = (rows_of[name][column] if name in rows_of else column).astype(dtype)
    return columns


def _moved(segments: Segments, device_of: Int64) -> Segments:
    return replace(segments, device=device_of[segments.device].astype(np.uint8))
