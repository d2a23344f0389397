"""Find the regular entries in a pickle, window by window, and decode them; the other bytes are kept.

What is decoded here is a guess: an entry looks right and ends where the next begins. `rest.py` proves it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import BinaryIO

import numpy as np

from tb_memplugin.read.snapshot.columns.layout import (
    BINPUT,
    EMPTY_DICT,
    LONG_BINPUT,
    MARK,
    MEMOIZE,
    MOST_BYTES,
    PUTS,
    SETITEMS,
    WORD,
    IrregularError,
    Layout,
    argument,
    layout_of,
)
from tb_memplugin.read.snapshot.columns.tokens import Tokens, get_of
from tb_memplugin.trace.tables import Bool, Int32, Int64, UInt8, in_memory

WINDOW_BYTES = 4 << 20
ENTRIES_AT_ONCE = 1 << 14
"""Their first bytes stay in the processor's cache."""

MOST_LAYOUTS, TRIES = 64, 32
"""Layouts in a pickle, and entries of each window that are tried as a new one. Real files have below 20."""

SAMPLES, EACH = 256, 16
"""Of so many first entries, each sixteenth says which fields entries have."""
MOST_REST, REST_SHARE = 8 << 20, 2
"""The pickle is left to the safe reader if more bytes than this, and this part of all, are not regular."""

FRAME, FRAME_BYTES = 0x95, 9
MOST_HEAD = MOST_BYTES + WORD
LONGEST_LIST = 60_000
BATCH = int.from_bytes(b"e(", "little")
"""After a thousand elements of a list, the pickler ends a batch and begins the next."""

FIRST_ENTRY = re.compile(
    rb"\}(?:\x94|q.|r.{4})\((?=(?:\x8c\x06|X\x06\0\0\0)action(?:\x94|q.|r.{4}))", re.DOTALL
)
LIST_OF_GETS = re.compile(rb"(?:\((?:h.|j.{4})+e|(?:h.|j.{4})a)?", re.DOTALL)


class Numbers(dict[bytes, int]):
    """Numbers distinct bytes in order of first appearance."""

    def __missing__(self, key: bytes) -> int:
        number = self[key] = len(self)
        return number


@dataclass(slots=True)
class Island:
    """Bytes that are no regular entries; at each of the offsets `cuts` a FRAME opcode was left out."""

    data: bytearray = field(default_factory=bytearray)
    cuts: list[int] = field(default_factory=list)


class Scan:
    """The regular entries of a pickle as columns, and all other bytes as islands around runs of them.

    Run `k` of `runs[k]` entries lies between `islands[k]` and `islands[k + 1]`. A value of an object column
    is the number under which the pickle stored it, or `-1 - n` if entries contain it: `written` has its
    bytes, of a list only those after its put.

    Args:
        stream: a binary stream at the pickle's first byte.
        least_bytes: a smaller pickle is not read.

    Raises:
        IrregularError: too little of the pickle is regular.
    """

    def __init__(self, stream: BinaryIO, least_bytes: int = 0) -> None:
        self.islands = [Island()]
        self.runs: list[int] = []
        self.layouts: list[Layout] = []
        self.written = Numbers()
        self.fields: tuple[tuple[bytes, bool], ...] = ()
        self._parts: dict[bytes | str, list[np.ndarray]] = {}
        self._are_gets = bytearray()
        self._rest = 0
        self._begin = b""
        self.proven = 0, 0  # bytes of the first island whose tokens were read, and what they store
        self._scan(stream, least_bytes)

    def column(self, key: bytes | str) -> np.ndarray:
        """Return a field's values in all regular entries and forget them: int64, or int32 for objects.

        Other columns are `layout`, the index of each entry's layout, and `put`, where puts are explicit: the
        number of its first.
        """
        return in_memory(self._parts.pop(key))

    def _scan(self, stream: BinaryIO, least_bytes: int) -> None:
        data, total = stream.read(WINDOW_BYTES), 0
        if len(data) < least_bytes:
            raise IrregularError("the pickle is small")
        if len(data) < 2 or data[0] != 0x80 or not 2 <= data[1] <= 5:
            raise IrregularError("the protocol is not known")
        self.memoizes = data[1] >= 4
        self._next_frame: int | None = 2 if self.memoizes else None
        base = 0
        while True:
            read = stream.read(WINDOW_BYTES)
            total = base + len(data)
            consumed = self._window(data, base, final=not read)
            if self._rest > max(MOST_REST, total // REST_SHARE):
                raise IrregularError("most of the pickle is not regular")
            if not read:
                break
            data, base = data[consumed:] + read, base + consumed
        if not self.runs:
            raise IrregularError("no entry is regular")
        if self._next_frame is not None and self._next_frame > total:
            raise IrregularError("a frame is longer than the file")

    def _window(self, data: bytes, base: int, *, final: bool) -> int:
        """Read a window. Return how many of its bytes are done; the last entry is not, unless it is final."""
        frames, end = self._frames(data, base)
        if self._begin:
            starts = self._starts(data)
        else:
            starts, searched = self._find_entries(data, frames, 1 if final else SAMPLES)
            end = end if final else min(end, searched)
        done = 0
        if not final:
            starts = starts[starts + MOST_HEAD <= len(data)]
        if len(starts) > 1:
            done = self._entries(data, starts, frames)
            end = end if final else int(starts[-1])
        self._keep(data, done, end, frames)
        if final and end < len(data):
            raise IrregularError("a frame has no end")
        self._next_frame = next((base + at for at in frames if at >= end), self._next_frame)
        return end

    def _frames(self, data: bytes, base: int) -> tuple[list[int], int]:
        """Return where frames begin in a window, and where the first that is not wholly in it would begin."""
        frames: list[int] = []
        while self._next_frame is not None and (at := self._next_frame - base) < len(data):
            if data[at] != FRAME:
                self._next_frame = None  # the last bytes need no frame; if there is another, its opcode stays
            elif at + FRAME_BYTES > len(data):
                return frames, at
            else:
                frames.append(at)
                length = int.from_bytes(data[at + 1 : at + FRAME_BYTES], "little")
                self._next_frame = self._next_frame + FRAME_BYTES + length
        return frames, len(data)

    def _find_entries(self, data: bytes, frames: list[int], least: int) -> tuple[Int64, int]:
        """Find the first entry, whose first key tells with which bytes others begin, and their usual fields.

        Return where entries may begin, and how many bytes need not be searched again. `least` entries must be
        in the window.
        """
        first, none = FIRST_ENTRY.search(data), np.zeros(0, np.int64)
        if not first:
            return none, max(len(data) - MOST_HEAD, 0)
        before = Island(bytearray(self.islands[0].data), list(self.islands[0].cuts))
        _keep(before, data, 0, first.start(), frames)
        number = Tokens(self.memoizes).read(before)
        self.proven = len(before.data), number
        self._begin = get_of(number + 1)
        starts = self._starts(data)
        some = starts[:SAMPLES:EACH].tolist()
        layouts = [layout for at in some if (layout := _layout_at(data, at)) is not None]
        if len(starts) < least or not layouts:
            self._begin = b""
            return none, first.start()
        self.fields = Counter(tuple(layout.fields) for layout in layouts).most_common(1)[0][0]
        return starts, len(data)

    def _starts(self, data: bytes) -> Int64:
        """Return where entries may begin: an empty dict, its put, MARK and the get of the first key."""
        begin, most = self._begin, len(data) - 2 * WORD
        if most <= 0:
            return np.zeros(0, np.int64)
        bytes_ = np.frombuffer(data, np.uint8)
        words = np.ndarray((len(data) - WORD + 1,), "<u8", data, 0, (1,))
        starts = np.flatnonzero(bytes_[:most] == EMPTY_DICT)
        if self.memoizes:
            whole = bytes((EMPTY_DICT, MEMOIZE, MARK)) + begin
            starts = starts[_begins_with(words[starts], whole)]
        else:
            put_bytes = np.zeros(256, np.int64)
            put_bytes[[BINPUT, LONG_BINPUT]] = 1 + PUTS[BINPUT], 1 + PUTS[LONG_BINPUT]
            behind = put_bytes[bytes_[starts + 1]]
            starts, behind = starts[behind > 0], behind[behind > 0]
            starts = starts[_begins_with(words[starts + 1 + behind], bytes((MARK,)) + begin)]
        return starts

    def _entries(self, data: bytes, starts: Int64, frames: list[int]) -> int:
        """Decode the entries between starts, and keep what is between runs. Return the end of the last."""
        count = len(starts) - 1
        ends, regular = np.zeros(count, np.int64), np.zeros(count, bool)
        parts: list[dict[bytes | str, np.ndarray]] = []
        for first in range(0, count, ENTRIES_AT_ONCE):
            rows = slice(first, min(first + ENTRIES_AT_ONCE, count))
            part, ends[rows], regular[rows] = self._decode(data, starts[rows], starts[1:][rows])
            parts.append(part)
        at = np.asarray(frames, np.int64)
        row = np.searchsorted(starts[:-1], at, side="right") - 1
        inside = row[(row >= 0) & (at < ends[row])]
        regular[inside] = False
        if (ends > starts[1:])[regular].any():
            raise IrregularError("entries overlap")
        for first, part in zip(range(0, count, ENTRIES_AT_ONCE), parts, strict=True):
            kept = regular[first : first + ENTRIES_AT_ONCE]
            for key, values in part.items():
                self._parts.setdefault(key, []).append(values[kept])
        return self._split(data, starts, ends, np.flatnonzero(regular), frames)

    def _split(self, data: bytes, starts: Int64, ends: Int64, rows: Int64, frames: list[int]) -> int:
        """Add runs of adjacent regular entries, and the islands before them."""
        done = 0
        if not len(rows):
            return done
        gaps = np.flatnonzero(ends[rows[:-1]] != starts[rows[1:]]) + 1
        bounds = [0, *gaps.tolist(), len(rows)]
        begins, lasts = starts[rows[bounds[:-1]]].tolist(), ends[rows[np.asarray(bounds[1:]) - 1]].tolist()
        for index, (begin, end) in enumerate(zip(begins, lasts, strict=True)):
            self._keep(data, done, begin, frames)
            size = bounds[index + 1] - bounds[index]
            if self.runs and not self.islands[-1].data:
                self.runs[-1] += size  # it goes on from the window before
            else:
                self.runs.append(size)
                self.islands.append(Island())
            done = end
        return done

    def _keep(self, data: bytes, begin: int, end: int, frames: list[int]) -> None:
        self._rest += end - begin
        _keep(self.islands[-1], data, begin, end, frames)

    def _decode(
        self, data: bytes, starts: Int64, nexts: Int64
    ) -> tuple[dict[bytes | str, np.ndarray], Int64, Bool]:
        """Return the columns of entries, their ends, and which are regular."""
        count = len(starts)
        part: dict[bytes | str, np.ndarray] = {
            key: np.zeros(count, np.int64 if is_integer else np.int32) for key, is_integer in self.fields
        }
        part["layout"] = np.zeros(count, np.uint8)
        if not self.memoizes:
            part["put"] = np.zeros(count, np.int64)
        ends, regular = np.zeros(count, np.int64), np.zeros(count, bool)
        fits = np.flatnonzero(starts + MOST_HEAD <= len(data))
        for layout, rows, heads in self._by_layout(data, starts, fits):
            index = self.layouts.index(layout)
            part["layout"][rows] = index
            good = self._arguments(part, layout, rows, heads)
            if layout.tail is None:
                ends[rows] = starts[rows] + layout.size
            else:
                ends[rows], values, proper = self._lists(data, starts[rows] + layout.size, nexts[rows])
                part[layout.tail][rows] = values
                good &= proper
            regular[rows] = good
        return part, ends, regular

    def _by_layout(self, data: bytes, starts: Int64, rows: Int64) -> Iterator[tuple[Layout, Int64, UInt8]]:
        """Yield the rows of each layout with their first bytes, contiguous; learn new layouts."""
        words = _heads(data, starts[rows], max((layout.words for layout in self.layouts), default=0) + 1)
        waiting = sorted(self.layouts, key=lambda layout: -layout.hits)
        tries = TRIES
        while len(rows):
            if waiting:
                layout = waiting.pop(0)
            else:
                tries -= 1
                if tries < 0 or len(self.layouts) >= MOST_LAYOUTS:
                    return
                new = _layout_at(data, int(starts[rows[0]]))
                if new is None or tuple(new.fields) != self.fields:
                    rows, words = rows[1:], words[1:]
                    continue
                layout = new
                self.layouts.append(layout)
                if words.shape[1] <= layout.words:
                    words = _heads(data, starts[rows], layout.words + 1)
            same = layout.matches(words)
            hits = int(np.count_nonzero(same))
            layout.hits += hits
            if not hits:
                continue
            mine = words if hits == len(rows) else words.compress(same, 0)  # several times faster than [same]
            yield layout, rows[same], mine.view(np.uint8)
            rows, words = rows[~same], words.compress(~same, 0)

    def _arguments(
        self, part: dict[bytes | str, np.ndarray], layout: Layout, rows: Int64, heads: UInt8
    ) -> Bool:
        """Fill the columns of entries of one layout. Return which have puts in order."""
        for key in layout.integers:
            part[key][rows] = layout.integer(key, heads)
        for key, (offset, size) in layout.gets.items():
            stored = argument(heads, offset, size)
            if size == 4 and stored.max() >= 1 << 31:
                raise IrregularError("a number under which something is stored is too large")
            part[key][rows] = stored
        for key, (begin, end) in layout.written.items():
            part[key][rows] = -1 - self._numbers(np.ascontiguousarray(heads[:, begin:end]))
        good = np.ones(len(rows), bool)
        if not self.memoizes:
            first = argument(heads, *layout.puts[0])
            part["put"][rows] = first
            for number, (offset, size) in enumerate(layout.puts):
                good &= argument(heads, offset, size) == first + number
        return good

    def _numbers(self, values: UInt8) -> Int64:
        """Return the number of each row of bytes."""
        numbers = np.zeros(len(values), np.int64)
        left = np.arange(len(values))
        for _ in range(8):  # mostly there is one
            number = self.written[values[left[0]].tobytes()]
            same = (values[left] == values[left[0]]).all(axis=1)
            numbers[left[same]] = number
            left = left[~same]
            if not len(left):
                return numbers
        size, raw = values.shape[1], values[left].tobytes()
        numbers[left] = [self.written[raw[at : at + size]] for at in range(0, len(raw), size)]
        return numbers

    def _lists(self, data: bytes, begins: Int64, nexts: Int64) -> tuple[Int64, Int32, Bool]:
        """Return the ends of entries that end in a list, the lists, and which consist of gets alone.

        Args:
            begins: where the lists begin, after their puts.
        """
        bytes_ = np.frombuffer(data, np.uint8)
        pairs = np.ndarray((len(data) - 1,), "<u2", data, 0, (1,))
        ends = nexts - 2 * (pairs[nexts - 2] == BATCH)
        proper = (bytes_[ends - 1] == SETITEMS) & (ends > begins) & (ends - begins < LONGEST_LIST)
        rows = np.flatnonzero(proper)
        spans = map(slice, begins[rows].tolist(), (ends[rows] - 1).tolist())
        values = np.zeros(len(begins), np.int32)
        numbers = np.fromiter(
            map(self.written.__getitem__, map(data.__getitem__, spans)), np.int32, len(rows)
        )
        values[rows] = -1 - numbers
        newest = [*islice(reversed(self.written), len(self.written) - len(self._are_gets))]
        for content in reversed(newest):
            self._are_gets.append(LIST_OF_GETS.fullmatch(content) is not None)
        proper[rows] = np.frombuffer(self._are_gets, bool)[numbers]
        return ends, values, proper


def _keep(island: Island, data: bytes, begin: int, end: int, frames: list[int]) -> None:
    """Add bytes of a window to an island, without frames' opcodes."""
    for at in frames:
        if begin <= at < end:
            island.data += data[begin:at]
            island.cuts.append(len(island.data))
            begin = at + FRAME_BYTES
    island.data += data[begin:end]


def _layout_at(data: bytes, at: int) -> Layout | None:
    try:
        return layout_of(data, at)
    except IrregularError:
        return None


def _heads(data: bytes, starts: Int64, words: int) -> np.ndarray:
    """Return the first words of entries: uint64, shape (starts, words)."""
    size = words * WORD
    everywhere: np.ndarray = np.ndarray((len(data) - size + 1,), f"V{size}", data, 0, (1,))
    return everywhere[starts].view("<u8").reshape(len(starts), words)


def _begins_with(words: Int64, begin: bytes) -> Bool:
    mask = np.uint64((1 << 8 * len(begin)) - 1)
    same: Bool = (words & mask) == np.uint64(int.from_bytes(begin, "little"))
    return same
