"""Prove that runs of regular entries are what they seem, and read what is around them.

The rest of the pickle goes to the safe reader, with one `Run` in place of each run of entries, and what
islands may get out of a run stored again under its number. A second pickle behind it gets the objects that
columns refer to.
"""

from __future__ import annotations

import copyreg
import io
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, BinaryIO

import numpy as np

from tb_memplugin.budget import give_back_freed
from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.read.collector import collector_at_rest
from tb_memplugin.read.snapshot.columns.layout import EMPTY_LIST, GETS, MARK, MEMOIZE, IrregularError
from tb_memplugin.read.snapshot.columns.scan import Scan
from tb_memplugin.read.snapshot.columns.tokens import Tokens, get_of
from tb_memplugin.read.snapshot.entries import FIELDS, EntryColumns, joined_numbers, joined_objects
from tb_memplugin.read.snapshot.pickle_reader import CHUNK_BYTES, PickleReader
from tb_memplugin.read.snapshot.safe_pickle import DAMAGE, PlainUnpickler, growth_watch
from tb_memplugin.trace.tables import Int32, Int64, pieces_of

AFTER_RUN = b"e}"
"""Opcodes that may follow a run: the end of its list's batch, or another entry."""

MOST_WANTED = 1 << 16
"""Values that may be stored again for islands; in real files at most one a FRAME."""

LEAST_BYTES = 768 << 10
"""A smaller pickle, of about 5,000 entries, is not read faster this way."""

MANY = 1 << 19
"""With so many entries, memory that was freed goes back to the system before more is needed."""

LIST_BEGINS = bytes((MARK, *GETS))


Fields = dict[str, tuple[np.ndarray, dict[int, Any] | None]]
"""The columns of regular entries by name: numbers, or codes and the object of each code."""


class Run:
    """Stands for a run of entries. It can do nothing that an entry can, so whatever uses it so fails."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]


def read_columns(stream: BinaryIO, where: str, least_bytes: int = LEAST_BYTES) -> dict[str, Any] | None:
    """Return a snapshot whose traces are `EntryColumns`; None if the safe reader has to read it.

    Args:
        stream: a binary stream at the pickle's first byte. After None, its position is anywhere.
        least_bytes: smaller pickles are left to the safe reader.

    Raises:
        UnreadableFileError: the stream cannot be unpacked, or exceeds its limit.
        OSError: reading the stream failed.
    """
    try:
        with collector_at_rest():
            scan = Scan(stream, least_bytes)
            rest = _Rest(scan, where)
            content, is_large = rest.content, rest.is_large
            del scan, rest
    except IrregularError:
        return None
    if is_large:
        give_back_freed()
    return content


class _Unpickler(PlainUnpickler):
    """Gives a `Run` for each number, which must be consecutive."""

    def __init__(self, reader: PickleReader | io.BufferedReader, where: str) -> None:
        super().__init__(reader, where)
        self.runs: list[Run] = []

    def persistent_load(self, _pid: object) -> Run:  # type: ignore[override]
        """Return the next run."""
        self.runs.append(Run())
        return self.runs[-1]


class _Rest:
    def __init__(self, scan: Scan, where: str) -> None:
        self._scan = scan
        self._layout = scan.column("layout")
        self._objects = [key for key, is_integer in scan.fields if not is_integer]
        self._number_entries()
        self._columns = {key: scan.column(key) for key, _ in scan.fields}
        self._written = list(scan.written)
        self.is_large = len(self._layout) >= MANY
        if self.is_large:
            give_back_freed()  # what each window left between the columns
        self._check_order()
        for key in self._objects:
            self._follow(key)
        wanted = self._wanted()
        distinct = {key: _distinct(self._columns[key]) for key in self._objects}
        fetched = self._fetch(wanted, list(distinct.values()))
        self.content = self._read(b"".join((*self._pieces(wanted), fetched)), where, distinct)

    def _number_entries(self) -> None:
        """Find the number under which each entry is stored, and what entries store."""
        scan = self._scan
        self._puts = np.array([len(layout.puts) for layout in scan.layouts], np.uint16)[self._layout]
        bounds = np.concatenate([[0], np.cumsum(scan.runs)])
        stores = np.add.reduceat(self._puts, bounds[:-1], dtype=np.int64)
        tokens, bases = Tokens(scan.memoizes), []
        begin, stored = scan.proven
        for run, island in enumerate(scan.islands):
            if run and (not island.data or island.data[0] not in AFTER_RUN):
                raise IrregularError("a run is not in a list")
            stored, begin = tokens.read(island, stored, begin), 0
            if run < len(scan.runs):
                bases.append(stored)
                stored += int(stores[run])
        number = np.int32 if stored < 1 << 31 else np.int64
        offsets = np.array(bases) - (np.cumsum(stores) - stores)
        self._first = np.cumsum(self._puts, dtype=number)
        self._first -= self._puts
        self._first += np.repeat(offsets.astype(number), scan.runs)
        self._bounds = bounds
        if not scan.memoizes and (scan.column("put") != self._first).any():
            raise IrregularError("numbers are not consecutive")

    def _check_order(self) -> None:
        """Check that entries get only what was stored before them."""
        used = np.zeros(len(self._written), bool)
        for key, rows in product(self._objects, pieces_of(len(self._first))):
            codes = self._columns[key][rows]
            if (codes >= self._first[rows]).any():
                raise IrregularError("an object is used before it is stored")
            used[-1 - codes[codes < 0]] = True
        lists = [row for row in np.flatnonzero(used).tolist() if _is_list(self._written[row])]
        highest = np.full(len(self._written), -1, np.int64)
        highest[lists] = _highest_gets([self._written[row] for row in lists])
        tails = {layout.tail for layout in self._scan.layouts if layout.tail is not None}
        for key, rows in product(tails, pieces_of(len(self._first))):
            codes = self._columns[key][rows]
            new = codes < 0
            if (highest[-1 - codes[new]] >= self._first[rows][new]).any():
                raise IrregularError("a frame is used before it is stored")
        if any(int.from_bytes(key[1:], "little") >= self._first[0] for key, _ in self._scan.fields):
            raise IrregularError("a key is used before it is stored")

    def _entries_of(self, numbers: Int64) -> tuple[Int64, Int64]:
        """Return the regular entries that store objects, -1 for none, and the numbers of their puts."""
        entry = np.searchsorted(self._first, numbers.astype(self._first.dtype), side="right") - 1
        put = numbers - self._first[entry.clip(min=0)]
        inside = (entry >= 0) & (put < self._puts[entry.clip(min=0)])
        return np.where(inside, entry, -1), put

    def _follow(self, key: bytes) -> None:
        """Replace gets of what another entry has in the same field by that entry's value."""
        codes = self._columns[key]
        of_layout = np.array([layout.put_of.get(key, -1) for layout in self._scan.layouts], np.int64)
        for piece in pieces_of(len(codes)):
            rows = np.flatnonzero(codes[piece] >= self._first[0]) + piece.start
            entry, put = self._entries_of(codes[rows])
            inside = entry >= 0
            rows, entry, put = rows[inside], entry[inside], put[inside]
            if (of_layout[self._layout[entry]] != put).any():
                raise IrregularError("a value is another field's")
            codes[rows] = codes[entry]  # which is written there

    def _wanted(self) -> list[tuple[int, int, bytes]]:
        """Return what islands may get out of runs: (entry, put, bytes of the value), in order.

        Bytes that look like a get may be another argument. Then a value is stored that nobody gets.
        """
        total = int(self._first[-1] + self._puts[-1])
        islands = b"".join(bytes(island.data) for island in self._scan.islands[1:]) + bytes(4)
        data = np.frombuffer(islands, np.uint8)
        short = np.flatnonzero(data[:-4] == b"h"[0]) + 1
        long = np.flatnonzero(data[:-4] == b"j"[0]) + 1
        words = np.ndarray((len(data) - 3,), "<u4", islands, 0, (1,))
        numbers = np.unique(np.concatenate([data[short].astype(np.int64), words[long].astype(np.int64)]))
        numbers = numbers[numbers < total]
        entries, puts = self._entries_of(numbers)
        inside = entries >= 0
        wanted = []
        for entry, put in zip(entries[inside].tolist(), puts[inside].tolist(), strict=True):
            stored = self._scan.layouts[self._layout[entry]].put_of
            key = next((key for key, number in stored.items() if number == put), None)
            if key is not None:
                wanted.append((entry, put, self._token(int(self._columns[key][entry]))))
        if len(wanted) > MOST_WANTED:
            raise IrregularError("too much is got out of runs")
        return wanted

    def _token(self, code: int) -> bytes:
        """Return opcodes that push a value."""
        if code >= 0:
            return get_of(code)
        written = self._written[-1 - code]
        return bytes((EMPTY_LIST,)) + written if _is_list(written) else written

    def _pieces(self, wanted: list[tuple[int, int, bytes]]) -> Iterator[bytes]:
        """Yield the rest of the pickle, without its end: objects have the numbers that they had."""
        scan = self._scan
        run_of = np.searchsorted(self._bounds, [entry for entry, _, _ in wanted], side="right") - 1
        of_run: dict[int, list[tuple[int, bytes]]] = {}
        for run, (entry, put, token) in zip(run_of.tolist(), wanted, strict=True):
            of_run.setdefault(run, []).append((int(self._first[entry]) + put, token))
        for run, island in enumerate(scan.islands):
            yield bytes(island.data)
            if run == len(scan.runs):
                break
            yield b"NQ"
            last = int(self._bounds[run + 1]) - 1
            stored = int(self._first[self._bounds[run]])
            for number, token in of_run.get(run, ()):
                if scan.memoizes:
                    yield bytes((MEMOIZE,)) * (number - stored) + token + bytes((MEMOIZE,)) + b"0"
                else:
                    yield token + b"r" + number.to_bytes(4, "little") + b"0"
                stored = number + 1
            if scan.memoizes:
                yield bytes((MEMOIZE,)) * int(self._first[last] + self._puts[last] - stored)

    def _fetch(self, wanted: list[tuple[int, int, bytes]], columns: Sequence[list[int]]) -> bytes:
        """Return a pickle of what columns refer to: names, values, wanted lists as stored and as new ones."""
        lists = [
            (int(self._first[entry]) + put, token) for entry, put, token in wanted if token[0] == EMPTY_LIST
        ]
        return b"".join(
            (
                b"(",
                _listed(key for key, _ in self._scan.fields),
                _listed(_listed(map(self._token, codes)) for codes in columns),
                _listed(get_of(number) for number, _ in lists),
                _listed(token for _, token in lists),
                b"l.",
            )
        )

    def _read(self, rest: bytes, where: str, distinct: dict[bytes, list[int]]) -> dict[str, Any]:
        unpickler = _Unpickler(_reader(rest, where), where)
        copyreg.clear_extension_cache()
        try:
            holder = [unpickler.load()]
            names, values, stored, new = unpickler.load()
        except (UnreadableFileError, *DAMAGE) as error:
            raise IrregularError("the rest is not a pickle") from error
        runs = unpickler.runs
        del unpickler  # its memo has a pointer for all that is stored in the file
        if any(type(name) is not str for name in names) or len(set(names)) < len(names):
            raise IrregularError("keys are not names")
        if type(holder[0]) is not dict or len(runs) != len(self._scan.runs):
            raise IrregularError("a run is lost")
        for old, copy in zip(stored, new, strict=True):
            if type(old) is not list or list(map(id, old)) != list(map(id, copy)):
                raise IrregularError("a list has changed")
        objects = {
            key: dict(zip(codes, some, strict=True))
            for (key, codes), some in zip(distinct.items(), values, strict=True)
        }
        columns = {
            name: (self._columns.pop(key), objects.get(key))
            for name, (key, _) in zip(names, self._scan.fields, strict=True)
        }
        del self._layout, self._puts, self._first
        if self.is_large:
            give_back_freed()
        self._place(holder, runs, columns)
        content: dict[str, Any] = holder[0]
        return content

    def _place(self, holder: list[Any], runs: list[Run], columns: Fields) -> None:
        """Replace traces that have runs by columns. Each run must be in one place, and in order."""
        _check_held_once(holder, 0)
        content, done = holder[0], 0
        if type(content.get("device_traces")) is not list:
            raise IrregularError("there are no traces")
        _check_held_once(content, "device_traces")
        traces = content["device_traces"]
        for row in range(len(traces)):
            if type(traces[row]) is list and Run in set(map(type, traces[row])):
                _check_held_once(traces, row)
                traces[row], done = self._trace(traces[row], runs, done, columns)
        if done != len(runs):
            raise IrregularError("a run is in no trace")
        for run in range(len(runs)):
            _check_held_once(runs, run)

    def _trace(
        self, trace: list[Any], runs: list[Run], done: int, columns: Fields
    ) -> tuple[EntryColumns, int]:
        """Return the columns of a trace, and how many runs are done."""
        others, dicts, at, first = [], [], 0, done
        for element in trace:
            if type(element) is Run:
                if done == len(runs) or element is not runs[done]:
                    raise IrregularError("runs are in another order")
                at += self._scan.runs[done]
                done += 1
            elif type(element) is dict:
                others.append(at)
                dicts.append(element)
                at += 1
            else:
                raise IrregularError("an entry is no dict")
        rows = slice(self._bounds[first], self._bounds[done])
        in_run = np.ones(at, bool)
        in_run[others] = False
        no_codes = np.zeros(int(self._bounds[-1]), np.int32)
        full, is_last = {}, done == len(runs)
        for name in FIELDS:
            values, is_known = [entry.get(name) for entry in dicts], name in columns
            taken = columns.pop if is_last else columns.get  # what is joined takes no memory twice
            codes, objects = taken(name, (no_codes, {0: None}))
            if objects is None:
                full[name] = joined_numbers(in_run, codes[rows], others, values)
            elif is_known or any(value is not None for value in values):
                full[name] = joined_objects(in_run, codes[rows], objects, others, values)
        return EntryColumns(at, full), done


def _reader(rest: bytes, where: str) -> PickleReader | io.BufferedReader:
    """Return a reader. The tokens are known, so in a short pickle there is nothing left to refuse."""
    if len(rest) <= CHUNK_BYTES:
        return io.BufferedReader(io.BytesIO(rest), len(rest))
    return PickleReader(io.BytesIO(rest), where, growth_watch(where))


def _check_held_once(holder: Any, key: Any) -> None:
    """Check that nothing but `holder` refers to `holder[key]`.

    Raises:
        IrregularError: something else does, which would not see what an entry is.
    """
    if _references(holder, key) != _references([Run()], 0):
        raise IrregularError("an entry, or what has entries, is in two places")


def _references(holder: Any, key: Any) -> int:
    return sys.getrefcount(holder[key])


def _is_list(written: bytes) -> bool:
    return not written or written[0] in LIST_BEGINS


def _listed(tokens: Any) -> bytes:
    return b"(" + b"".join(tokens) + b"l"


def _distinct(codes: Int32) -> list[int]:
    """Return the distinct values of a column, ascending."""
    least = int(codes.min())
    seen = np.zeros(int(codes.max()) - least + 1, bool)
    seen[codes - least] = True
    distinct: list[int] = (np.flatnonzero(seen) + least).tolist()
    return distinct


def _highest_gets(lists: Sequence[bytes]) -> Int64:
    """Return the highest number in each list of gets, -1 for an empty list; all lists step together."""
    raw = b"".join(lists) + bytes(4)
    data, words = np.frombuffer(raw, np.uint8), np.ndarray((len(raw) - 3,), "<u4", raw, 0, (1,))
    sizes = np.fromiter(map(len, lists), np.int64, len(lists))
    ends = np.cumsum(sizes)
    at = ends - sizes
    at += (sizes > 0) & (data[at] == MARK)
    highest = np.full(len(lists), -1, np.int64)
    going = np.flatnonzero(at < ends - 1)
    while len(going):
        here = at[going]
        short = data[here] == b"h"[0]
        numbers = np.where(short, data[here + 1], words[here + 1]).astype(np.int64)
        highest[going] = np.maximum(highest[going], numbers)
        at[going] = here = here + np.where(short, 2, 5)
        going = going[here < ends[going] - 1]
    return highest
