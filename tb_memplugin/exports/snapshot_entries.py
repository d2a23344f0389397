"""The trace entries of one device of a memory snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tb_memplugin.exports.recorded import times_are_known
from tb_memplugin.exports.snapshot_segments import final_reserve
from tb_memplugin.trace import Kind, MemoryTrace
from tb_memplugin.trace.frames import read_frame
from tb_memplugin.trace.tables import MODULE_MARK, Int64

Json = dict[str, Any]

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
        self._timed = times_are_known(trace)
        self._unexplained = self._reserve_changes(device, slack)
        self._row_of = self._allocation_of_event(device)
        self._unseen = self._ended_by_allocs(device)
        strays = np.isin(trace.events.kind[self._events], ENDS) & (self._row_of < 0)
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
        self._add_known(entries, "stream", self._trace.streams)
        self._add_known(entries, "pool_id", [tuple(pool) for pool in self._trace.pools])
        self._add_times(entries)
        self._add_contexts(entries)
        self._add_forward(entries)
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
        pairs = zip(events.label[rows].tolist(), events.module[rows].tolist(), strict=True)
        return [
            labels[label] if label >= 0 else modules[module] if module >= 0 else "" for label, module in pairs
        ]

    def _add_known(self, entries: list[Json], field: str, table: Sequence[Any]) -> None:
        """Add the stream or the pool to entries for which it is known."""
        column = self._trace.events.stream if field == "stream" else self._trace.events.pool
        for entry, row in zip(entries, column[self._events].tolist(), strict=True):
            if row >= 0:
                entry[field] = table[row]

    def _add_times(self, entries: list[Json]) -> None:
        if self._timed:
            times = (self._trace.events.time_ns[self._events] // 1_000).tolist()
            for entry, time in zip(entries, times, strict=True):
                entry["time_us"] = time

    def _add_contexts(self, entries: list[Json]) -> None:
        if self._trace.contexts:
            names = (*self._trace.contexts, "N/A")
            rows = self._trace.events.context[self._events].tolist()
            for entry, row in zip(entries, rows, strict=True):
                entry["compile_context"] = names[row]

    def _add_forward(self, entries: list[Json]) -> None:
        rows = self._trace.events.forward[self._events]
        for index in np.flatnonzero(rows >= 0).tolist():
            entries[index]["forward_frames"] = list(self._trace.stacks[rows[index]])

    def _mend_ooms(self, entries: list[Json]) -> None:
        """Give `oom` entries no address, but the free bytes of the device if they are known."""
        index_of = {event: index for index, event in enumerate(self._events.tolist())}
        free = {oom.event: oom for oom in self._trace.ooms}
        for index in np.flatnonzero(self._trace.events.kind[self._events] == Kind.OOM).tolist():
            del entries[index]["addr"]
        for event, oom in free.items():
            if event in index_of and oom.free_bytes is not None:
                entries[index_of[event]]["device_free"] = oom.free_bytes

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
        sign = np.zeros(len(Kind), np.int64)
        sign[[Kind.SEGMENT_ALLOC, Kind.SEGMENT_MAP]] = 1
        sign[[Kind.SEGMENT_FREE, Kind.SEGMENT_UNMAP]] = -1
        explained = sign[events.kind[rows]] * events.bytes[rows]
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
