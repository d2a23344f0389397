"""A memory snapshot as PyTorch writes it, for memory_viz, Mosaic and `load`.

Schema: docstring of `torch.cuda.memory._snapshot`. The file keeps exactly what was alive at the start and
after each event, requested sizes, reserved bytes, stacks, streams, pools and annotations. The format has no
fields for categories, operators, phases and module calls; the module of an allocation is written to its
`user_metadata`.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from tb_memplugin.analysis.layout import Layout, layout, pending_since
from tb_memplugin.exports.output import replacing, written_by
from tb_memplugin.trace import Kind, MemoryTrace, Phase
from tb_memplugin.trace.allocator import RESERVE_SIGN, rounded_by_rule
from tb_memplugin.trace.frames import read_frame
from tb_memplugin.trace.tables import CERTAIN, MODULE_MARK, Bool, Int64, code_mask

PROTOCOL = 4
"""The pickle protocol. PyTorch's own viewer shows nothing for protocol 5 (pytorch#183842)."""

ENTRIES_AT_ONCE = 1 << 12
"""How many entries are converted to JSON at a time."""

Json = dict[str, Any]


def write(trace: MemoryTrace, path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Write the snapshot as a pickle.

    Returns:
        Sentences about what had to be made up or left out. The file contains them too, in its
        `allocator_settings`.

    Raises:
        MemPluginError: the file cannot be written.
    """
    content, notes = snapshot_of(trace)
    with replacing(path) as stream:
        pickle.dump(content, stream, PROTOCOL)
    return notes


def write_json(trace: MemoryTrace, path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Write the snapshot as JSON. Every entry repeats its frames, because JSON has no references.

    Returns:
        Sentences about what had to be made up or left out.

    Raises:
        MemPluginError: the file cannot be written.
    """
    content, notes = snapshot_of(trace)
    traces = content.pop("device_traces")
    with replacing(path) as stream:
        stream.write(json.dumps(content)[:-1].encode("ascii") + b', "device_traces": [')
        for number, entries in enumerate(traces):
            stream.write(b"[" if number == 0 else b",\n[")
            for first in range(0, len(entries), ENTRIES_AT_ONCE):
                chunk = json.dumps(entries[first : first + ENTRIES_AT_ONCE])[1:-1]
                stream.write(f"{',' if first else ''}\n{chunk}".encode("ascii"))
            stream.write(b"]")
        stream.write(b"]}\n")
    return notes


def snapshot_of(trace: MemoryTrace) -> tuple[Json, tuple[str, ...]]:
    """Return the snapshot's dict, and sentences about what had to be made up or left out."""
    frames = Frames(trace.stacks)
    numbers = device_numbers(trace)
    count = max(numbers.values(), default=-1) + 1
    traces: list[list[Json]] = [[] for _ in range(count)]
    segments: list[Json] = []
    notes = [
        f"{trace.devices[row].name} is written as cuda:{number}."
        for row, number in numbers.items()
        if trace.devices[row].name.partition(":")[2] != str(number)
    ]
    for row, number in numbers.items():
        address = addresses_of(trace, row)
        final = final_segments(trace, row, number, address, frames)
        entries = Entries(trace, row, address.of, final.slack, frames)
        traces[number] = entries.written()
        segments += final.segments
        notes += [f"{trace.devices[row].name}: {text}" for text in entries.notes]
        if address.made_up:
            notes.append(f"{trace.devices[row].name}: {address.made_up:,} blocks have made-up addresses.")
        if not final.recorded:
            notes.append(
                f"{trace.devices[row].name}: no segments were recorded. Those in this file are made up "
                "around the live blocks: only their sum is meaningful."
            )
    settings = {key: value for key, value in trace.properties.items() if ".reserved_bytes_at_" not in key}
    about = f"Written by {written_by()} from: {trace.source}. {' '.join(notes)}".rstrip()
    content = {
        "segments": segments,
        "device_traces": traces,
        "allocator_settings": {**settings, "tb_memplugin": about},
        "external_annotations": _annotations(trace, numbers),
    }
    return content, tuple(notes)


def device_numbers(trace: MemoryTrace) -> dict[int, int]:
    """Return the index of each used device in the snapshot: 1 for `cuda:1`; a CPU gets the first free one."""
    used = [row for row in range(len(trace.devices)) if trace.is_used(row)]
    numbers: dict[int, int] = {}
    for row in used:
        kind, _, index = trace.devices[row].name.partition(":")
        if index.isdecimal() and int(index) < 256 and kind != "cpu" and int(index) not in numbers.values():
            numbers[row] = int(index)
    for row in used:
        if row not in numbers:
            numbers[row] = next(n for n in range(len(used) + 256) if n not in numbers.values())
    return numbers


def _annotations(trace: MemoryTrace, numbers: dict[int, int]) -> list[Json]:
    """Return the recorded annotations; for a profile also its steps and phases, on every device."""
    recorded = trace.annotations
    rows = zip(
        recorded.time_ns.tolist(),
        recorded.ends.tolist(),
        recorded.name.tolist(),
        recorded.device.tolist(),
        strict=True,
    )
    written = [
        _annotation(time, bool(ends), trace.annotation_names[name], numbers[device])
        for time, ends, name, device in rows
        if device in numbers
    ]
    if trace.source == "snapshot" or not trace.times_are_known:
        return written
    spans = [(step.start_ns, step.end_ns, f"ProfilerStep#{step.number}") for step in trace.steps]
    phases = trace.phases
    spans += [
        (start, end, Phase(name).key)
        for start, end, name in np.stack((phases.start_ns, phases.end_ns, phases.name), axis=1).tolist()
    ]
    for start, end, name in spans:
        for number in numbers.values():
            written += [_annotation(start, False, name, number), _annotation(end, True, name, number)]
    return sorted(written, key=lambda annotation: int(annotation["time_us"]))


def _annotation(time_ns: int, ends: bool, name: str, device: int) -> Json:
    return {"name": name, "stage": "END" if ends else "START", "device": device, "time_us": time_ns // 1_000}


ACTIONS = {
    Kind.ALLOC: "alloc",
    Kind.FREE_COMPLETED: "free_completed",
    Kind.FREE_REQUESTED: "free_requested",
    Kind.STORAGE_FREE: "free_completed",
    Kind.SEGMENT_ALLOC: "segment_alloc",
    Kind.SEGMENT_FREE: "segment_free",
    Kind.SEGMENT_MAP: "segment_map",
    Kind.SEGMENT_UNMAP: "segment_unmap",
    Kind.OOM: "oom",
    Kind.MARK: "snapshot",
}
ENDS = (Kind.FREE_COMPLETED, Kind.STORAGE_FREE)


class Frames:
    """Frames and stacks in a snapshot's form. Each is created once, so the pickle stores references."""

    def __init__(self, stacks: Sequence[Sequence[str]]) -> None:
        self._stacks = stacks
        self._frames: dict[str, Json] = {}
        self._lists: dict[int, list[Json]] = {-1: []}

    def of(self, row: int) -> list[Json]:
        """Return the frames of a stack, innermost first."""
        if row not in self._lists:
            self._lists[row] = [self._frame(text) for text in self._stacks[row]]
        return self._lists[row]

    def _frame(self, text: str) -> Json:
        if text not in self._frames:
            frame = read_frame(text)
            fx = frame.fx.split(" ", 2)
            fx_fields = dict(zip(("fx_node_name", "fx_node_op", "fx_node_target"), fx, strict=False))
            self._frames[text] = {
                "filename": frame.file,
                "name": frame.function,
                "line": frame.line,
                **(fx_fields if frame.fx else {}),
            }
        return self._frames[text]


class Entries:
    """The entries of a device; `notes` are sentences about what had to be made up or left out."""

    def __init__(
        self, trace: MemoryTrace, device: int, address: list[int], slack: tuple[int, int], frames: Frames
    ) -> None:
        self._trace = trace
        self._frames = frames
        self._address = address
        self._events = np.flatnonzero(trace.events.device == device)
        self._timed = trace.times_are_known
        self._unexplained = self._reserve_changes(device, slack)
        self._row_of = self._allocation_of_event(device)
        self._unseen = self._ended_by_allocs(device)
        strays = code_mask(ENDS)[trace.events.kind[self._events]] & (self._row_of < 0)
        self._left_out = set(self._events[strays].tolist())
        self.notes: list[str] = []
        self._note()

    def written(self) -> list[Json]:
        """Return the entries in time order."""
        entries: list[Json] = []
        plain = self._plain_entries()
        if not (self._unexplained or self._unseen or self._left_out):
            return plain
        for event, entry in zip(self._events.tolist(), plain, strict=True):
            entries += [{**entry, **change} for change in self._unexplained.get(event, ())]
            entries += [{**entry, **end} for end in self._unseen.get(event, ())]
            if event not in self._left_out:
                entries.append(entry)
        return entries

    def _plain_entries(self) -> list[Json]:
        """Return one entry per event."""
        events, rows = self._trace.events, self._events
        frames = self._frames.of
        columns = (
            events.kind[rows].tolist(),
            self._addresses(),
            self._sizes(),
            map(frames, events.stack[rows].tolist()),
            self._metadata(),
        )
        actions = {int(kind): action for kind, action in ACTIONS.items()}
        entries: list[Json] = [
            {"action": actions[kind], "addr": address, "size": size, "frames": stack, "user_metadata": text}
            for kind, address, size, stack, text in zip(*columns, strict=True)
        ]
        for field, values in self._known_fields():
            for entry, value in zip(entries, values, strict=True):
                if value is not None:
                    entry[field] = value
        self._mend_ooms(entries)
        return entries

    def _addresses(self) -> list[int]:
        addresses: list[int] = self._trace.events.address[self._events].tolist()
        for index, row in enumerate(self._row_of.tolist()):
            if row >= 0:
                addresses[index] = self._address[row]
        return addresses

    def _sizes(self) -> list[int]:
        """Return the size of each entry; a free has the size of its block, whatever its event says."""
        own = self._trace.events.bytes[self._events]
        of_block = self._trace.allocations.bytes[self._row_of] if len(self._trace.allocations) else own
        sizes: list[int] = np.where(self._row_of >= 0, of_block, own).tolist()
        return sizes

    def _metadata(self) -> list[str]:
        labels = self._trace.labels
        modules = [f"{MODULE_MARK}{module.key}" if module.is_module else "" for module in self._trace.modules]
        events, rows = self._trace.events, self._events
        # What was inferred is left out: a reader of the snapshot would take it for recorded.
        recorded = np.where(events.module_confidence == CERTAIN, events.module, -1)
        pairs = zip(events.label[rows].tolist(), recorded[rows].tolist(), strict=True)
        return [
            labels[label] if label >= 0 else modules[module] if module >= 0 else "" for label, module in pairs
        ]

    def _known_fields(self) -> Iterator[tuple[str, Iterable[Any]]]:
        """Yield fields that not all entries have, with the value of each entry, None where it has none."""
        trace, events, rows = self._trace, self._trace.events, self._events
        streams, pools = (*trace.streams, None), (*map(tuple, trace.pools), None)
        yield "stream", map(streams.__getitem__, events.stream[rows].tolist())
        yield "pool_id", map(pools.__getitem__, events.pool[rows].tolist())
        if self._timed:
            yield "time_us", (events.time_ns[rows] // 1_000).tolist()
        if trace.contexts:
            yield "compile_context", map((*trace.contexts, "N/A").__getitem__, events.context[rows].tolist())
        forward = events.forward[rows].tolist()
        yield "forward_frames", (list(trace.stacks[row]) if row >= 0 else None for row in forward)

    def _mend_ooms(self, entries: list[Json]) -> None:
        """Give `oom` entries no address, but the free bytes of the device if they are known."""
        free = {oom.event: oom.free_bytes for oom in self._trace.ooms}
        for index in np.flatnonzero(self._trace.events.kind[self._events] == Kind.OOM).tolist():
            del entries[index]["addr"]
            if (size := free.get(int(self._events[index]))) is not None:
                entries[index]["device_free"] = size

    def _allocation_of_event(self, device: int) -> Int64:
        """Return the row of `trace.allocations` that each event allocates or frees, -1 for none."""
        blocks, events = self._trace.allocations, self._trace.events
        row_of = np.full(len(events) + 1, -1, np.int64)
        own_blocks = np.flatnonzero(blocks.device == device)
        row_of[blocks.freed[own_blocks]] = own_blocks
        born = own_blocks[blocks.born[own_blocks] >= 0]
        row_of[blocks.born[born]] = born
        own: Int64 = row_of[self._events]
        return own

    def _ended_by_allocs(self, device: int) -> dict[int, list[Json]]:
        """Return entries for unrecorded frees: those of blocks whose address was allocated again."""
        blocks, events = self._trace.allocations, self._trace.events
        ended = np.flatnonzero((blocks.device == device) & (blocks.freed < len(events)))
        ended = ended[events.kind[blocks.freed[ended]] == Kind.ALLOC]
        frees: dict[int, list[Json]] = {}
        for row in ended.tolist():
            end = {"action": "free_completed", "addr": self._address[row], "size": int(blocks.bytes[row])}
            frees.setdefault(int(blocks.freed[row]), []).append({**end, "frames": []})
        return frees

    def _reserve_changes(self, device: int, slack: tuple[int, int]) -> dict[int, list[Json]]:
        """Return maps and unmaps of made-up segments for changes of the reserve without a segment event."""
        events, rows = self._trace.events, self._events
        reserved = self._trace.reserved(device)
        if reserved is None or final_reserve(self._trace, device) is None or not len(rows):
            return {}
        explained = RESERVE_SIGN[events.kind[rows]] * events.bytes[rows]
        level = reserved[rows + 1]
        start = self._trace.devices[device].reserved_at_start
        change = np.diff(level, prepend=level[0] - explained[0] if start is None else start) - explained
        base, at_end = slack
        height = at_end - int(change.sum())
        entries: dict[int, list[Json]] = {}
        for index in np.flatnonzero(change).tolist():
            size = int(change[index])
            action = "segment_map" if size > 0 else "segment_unmap"
            entry = {"action": action, "addr": base + min(height, height + size), "size": abs(size)}
            entries[int(rows[index])] = [{**entry, "frames": []}]
            height += size
        return entries

    def _note(self) -> None:
        if self._unexplained:
            self.notes.append(
                f"changes of the reserved memory at made-up addresses: {len(self._unexplained):,}."
            )
        if self._unseen:
            count = sum(map(len, self._unseen.values()))
            self.notes.append(f"frees that were not recorded, placed before the next allocation: {count:,}.")
        if self._left_out:
            self.notes.append(f"frees of unknown blocks, left out: {len(self._left_out):,}.")


MOST = 1 << 62
"""A limit in bytes that no block reaches."""

ROOM_BEYOND = 1 << 46
"""Address space to keep free after the highest known address, for gaps and made-up segments."""

SLACK_GAP = 1 << 40
"""Distance of made-up addresses from all known ones, so large that they cannot be adjacent."""


@dataclass(frozen=True, slots=True)
class FinalSegments:
    """Segments at the end of the trace. `recorded`: whether they are all the allocator's own.

    `slack`: where made-up reserved memory begins, and how many bytes of it there are at the end.
    """

    segments: list[Json]
    recorded: bool
    slack: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Addresses:
    """An address for every row of `trace.allocations`, 0 for other devices' rows; and one beyond all of them.

    `made_up` counts the blocks for which the trace has no address, or one that cannot be right.
    """

    of: list[int]
    beyond: int
    made_up: int


def addresses_of(trace: MemoryTrace, device: int) -> Addresses:
    """Return the addresses of a device's blocks; made-up addresses are never used twice.

    Some sources give numbers that are no addresses (a memory timeline counts its tensors). If blocks that
    are alive together would overlap, all of the device's addresses are made up.
    """
    blocks = trace.allocations
    own = blocks.device == device
    has_address = own & (blocks.address != 0)
    if not all(_are_disjoint(trace, device, event) for event in (-1, len(trace.events) - 1)):
        has_address[:] = False
    made_up_bytes = int(rounded_by_rule(blocks.bytes[own & ~has_address]).sum())
    if _end(trace, has_address) + made_up_bytes > (1 << 64) - ROOM_BEYOND:
        has_address[:] = False
    top = _end(trace, has_address) // SLACK_GAP * SLACK_GAP + SLACK_GAP
    rows = np.flatnonzero(own & ~has_address)
    behind = np.cumsum(rounded_by_rule(blocks.bytes[rows]))
    address = np.where(has_address, blocks.address, np.uint64(0))
    address[rows[:1]] = top
    address[rows[1:]] = np.uint64(top) + behind[:-1].astype(np.uint64)
    beyond = top + (int(behind[-1]) if len(rows) else 0) + SLACK_GAP
    return Addresses(address.tolist(), beyond, len(rows))


def _end(trace: MemoryTrace, rows: Bool) -> int:
    """Return an address after the ends of all these blocks, 0 if there are none."""
    blocks = trace.allocations
    return int(blocks.address[rows].max(initial=0)) + int(blocks.bytes[rows].max(initial=0))


def _are_disjoint(trace: MemoryTrace, device: int, event: int) -> bool:
    """Return whether no two live blocks overlap."""
    blocks = trace.allocations
    rows = blocks.alive_at(event, device)
    rows = rows[blocks.address[rows] != 0]
    rows = rows[np.argsort(blocks.address[rows])]
    gap = np.diff(blocks.address[rows])
    return bool((gap >= blocks.bytes[rows[:-1]].astype(np.uint64)).all())


def final_reserve(trace: MemoryTrace, device: int) -> int | None:
    """Return the reserved bytes after the last event; None if nothing is reserved or it is not known."""
    if not trace.devices[device].has_reserved:
        return None
    reserved = trace.events.reserved[trace.events.device == device]
    reserved = reserved[reserved >= 0]
    return int(reserved[-1]) if len(reserved) else trace.devices[device].reserved_at_start


def final_segments(
    trace: MemoryTrace, device: int, number: int, address: Addresses, frames: Frames
) -> FinalSegments:
    """Return the segments and blocks of a device after the last event.

    Recorded segments are kept if they agree with the blocks and the reserved bytes. Otherwise (on the CPU,
    or in a profile without segments) they are made up around the live blocks, so that they sum to the
    reserved bytes.

    Args:
        number: the device's index in the snapshot.
    """
    writer = _Writer(trace, device, number, address.of, frames)
    reserve = final_reserve(trace, device)
    at_end = layout(trace, device, len(trace.events) - 1)
    total = int(at_end.segments.bytes.sum())
    if (
        len(at_end.segments)
        and (reserve is None or total == reserve)
        and not len(at_end.misfits)
        and not address.made_up
    ):
        return FinalSegments(writer.recorded(at_end), True, (address.beyond, 0))
    if not reserve and not trace.live(device).any():
        return FinalSegments([], True, (address.beyond, 0))
    return writer.made_up(reserve, address.beyond)


class _Writer:
    def __init__(
        self, trace: MemoryTrace, device: int, number: int, address: list[int], frames: Frames
    ) -> None:
        self._trace = trace
        self._device = device
        self._number = number
        self._address = address
        self._frames = frames
        self._pending = pending_since(trace, device) < len(trace.events)

    def recorded(self, at_end: Layout) -> list[Json]:
        """Return the allocator's own segments, with their free stretches."""
        inside: list[list[Json]] = [[] for _ in range(len(at_end.segments))]
        live = (at_end.segment, at_end.rows, at_end.extent)
        for segment, row, extent in zip(*(column.tolist() for column in live), strict=True):
            inside[segment].append(self._live(row, extent))
        free = (at_end.free_segment, at_end.free_address, at_end.free_bytes)
        for segment, address, size in zip(*(column.tolist() for column in free), strict=True):
            inside[segment].append(_free(address, size))
        return [
            self._segment(*columns, blocks)
            for columns, blocks in zip(at_end.segments.rows(), inside, strict=True)
        ]

    def made_up(self, reserve: int | None, beyond: int) -> FinalSegments:
        """Make one segment for each run of adjacent live blocks, and a free one for the remaining reserve."""
        blocks = self._trace.allocations
        rows = blocks.alive_at(len(self._trace.events) - 1, self._device)
        rows = rows[np.argsort(np.array([self._address[row] for row in rows.tolist()], np.uint64))]
        extent = self._extents(rows, reserve)
        segments = self._runs(rows.tolist(), extent.tolist())
        block_bytes = int(extent.sum())
        target = max(block_bytes, int(self._trace.live(self._device).max())) if reserve is None else reserve
        slack = max(0, target - block_bytes)
        if slack:
            segments.append(self._segment(beyond, slack, -1, -1, True, [_free(beyond, slack)]))
        return FinalSegments(segments, False, (beyond, slack))

    def _extents(self, rows: np.ndarray, reserve: int | None) -> Int64:
        """Return the extent of each block: as recorded, else by the rounding rule if there is room."""
        blocks = self._trace.allocations
        size, recorded = blocks.bytes[rows], blocks.rounded[rows]
        cuda = self._trace.devices[self._device].has_reserved
        wanted = np.where(recorded >= 0, recorded, rounded_by_rule(size) if cuda else np.maximum(size, 1))
        if reserve is not None and int(wanted.sum()) > reserve:
            wanted = np.maximum(size, 1)
        address = [self._address[row] for row in rows.tolist()]
        room = [min(behind - before, MOST) for before, behind in pairwise(address)]
        limit = np.array([*room, MOST][: len(rows)], np.int64)
        extent: Int64 = np.maximum(np.minimum(wanted, limit), np.minimum(size, wanted))
        return extent

    def _runs(self, rows: list[int], extents: list[int]) -> list[Json]:
        runs: list[list[Json]] = []
        owners: list[int] = []
        end = -1
        for row, extent in zip(rows, extents, strict=True):
            if self._address[row] != end:
                runs.append([])
                owners.append(row)
            runs[-1].append(self._live(row, extent))
            end = self._address[row] + extent
        blocks = self._trace.allocations
        return [
            self._segment(
                run[0]["address"],
                sum(block["size"] for block in run),
                int(blocks.stream[owner]),
                int(blocks.pool[owner]),
                False,
                run,
            )
            for run, owner in zip(runs, owners, strict=True)
        ]

    def _live(self, row: int, extent: int) -> Json:
        blocks = self._trace.allocations
        return {
            "address": self._address[row],
            "size": extent,
            "requested_size": int(blocks.bytes[row]),
            "state": "active_pending_free" if self._pending[row] else "active_allocated",
            "frames": self._frames.of(int(blocks.stack[row])),
        }

    def _segment(
        self, address: int, size: int, stream: int, pool: int, expandable: bool, blocks: list[Json]
    ) -> Json:
        blocks.sort(key=lambda block: int(block["address"]))
        live = [block for block in blocks if block["state"] != "inactive"]
        allocated = [block for block in live if block["state"] == "active_allocated"]
        return {
            "device": self._number,
            "address": address,
            "total_size": size,
            "allocated_size": sum(block["size"] for block in allocated),
            "active_size": sum(block["size"] for block in live),
            "requested_size": sum(block["requested_size"] for block in live),
            "stream": self._trace.streams[stream] if stream >= 0 else 0,
            "segment_type": "small" if size == 2 << 20 else "large",
            **({"segment_pool_id": tuple(self._trace.pools[pool])} if pool >= 0 else {}),
            "is_expandable": bool(expandable),
            "frames": [],
            "blocks": blocks,
        }


def _free(address: int, size: int) -> Json:
    return {"address": address, "size": size, "requested_size": 0, "state": "inactive", "frames": []}
