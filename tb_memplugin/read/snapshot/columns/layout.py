"""The bytes of one kind of regular trace entry: which are opcodes, and where their arguments are."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tb_memplugin.trace.tables import Bool, Int64, UInt8

EMPTY_DICT, EMPTY_LIST, MARK, SETITEMS, TUPLE2 = b"}"[0], b"]"[0], b"("[0], b"u"[0], 0x86
MEMOIZE, BINPUT, LONG_BINPUT = 0x94, b"q"[0], b"r"[0]
LONG1, SHORT_BINUNICODE, BINUNICODE = 0x8A, 0x8C, b"X"[0]
PUTS = {MEMOIZE: 0, BINPUT: 1, LONG_BINPUT: 4}
GETS = {b"h"[0]: 1, b"j"[0]: 4}
INTEGERS = {b"K"[0]: 1, b"M"[0]: 2, b"J"[0]: 4}
"""Opcodes with the bytes of their arguments."""

CONSTANTS = b"N\x88\x89)"
"""None, True, False and the empty tuple."""

WORD = 8
MOST_BYTES = 32 * WORD
"""An entry with more bytes before its frames is left to the safe reader."""

UNSIGNED = {1: "u1", 2: "<u2", 4: "<u4"}


class IrregularError(Exception):
    """The pickle, or a part of it, is not what this reader proves; the safe reader reads it."""


@dataclass(slots=True)
class Layout:
    """Where the fields are in entries that have the same opcodes.

    Fields are known by the get of their key, as bytes. Offsets are from the entry's first byte. `integers`
    are (offset, bytes, whether signed), `gets` (offset, bytes), `written` the ranges of values that are
    written in the entry itself: texts, constants, pairs of integers. `puts` are the arguments of its puts:
    (offset, bytes); `put_of` is the number of the put that stores a field's value. If `tail` is a field, its
    list follows after `size` bytes and ends the entry; else the entry has `size` bytes.
    """

    size: int = 0
    fields: list[tuple[bytes, bool]] = field(default_factory=list)
    integers: dict[bytes, tuple[int, int, bool]] = field(default_factory=dict)
    gets: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    written: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    puts: list[tuple[int, int]] = field(default_factory=list)
    put_of: dict[bytes, int] = field(default_factory=dict)
    tail: bytes | None = None
    opcodes: bytes = b""
    mask: bytes = b""
    hits: int = 0

    @property
    def words(self) -> int:
        """The 8-byte words that its opcodes are in."""
        return len(self.mask) // WORD

    def matches(self, words: Int64) -> Bool:
        """Return which entries have this layout.

        Args:
            words: the first bytes of entries: uint64, shape (entries, at least `self.words`).
        """
        masks, opcodes = np.frombuffer(self.mask, "<u8"), np.frombuffer(self.opcodes, "<u8")
        same = np.ones(len(words), bool)
        for word in np.flatnonzero(masks):
            same &= (words[:, word] & masks[word]) == opcodes[word]
        return same

    def integer(self, key: bytes, heads: UInt8) -> Int64:
        """Return an integer field of entries, from their first bytes, which are contiguous."""
        offset, size, signed = self.integers[key]
        if not signed:
            return argument(heads, offset, size)
        wide: Int64 = np.ndarray((len(heads),), "<i8", heads, offset, (heads.shape[1],))
        shift = 64 - 8 * size
        extended: Int64 = (wide << shift) >> shift
        return extended


def argument(heads: UInt8, offset: int, size: int) -> Int64:
    """Return unsigned arguments at an offset in the first bytes of entries: int64, shape (entries,)."""
    written: np.ndarray = np.ndarray((len(heads),), UNSIGNED[size], heads, offset, (heads.shape[1],))
    return written.astype(np.int64)


class _Learner:
    """Walks over one entry."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self._begin, self._at = data, at, at
        self._mask = bytearray(MOST_BYTES)
        self._keys: set[bytes] = set()
        self.layout = Layout()

    def learn(self) -> Layout:
        self._expect(EMPTY_DICT)
        self._put(None)
        self._expect(MARK)
        layout = self.layout
        while layout.tail is None and self._opcode != SETITEMS:
            begin = self._at
            if self._opcode not in GETS:
                raise IrregularError("a key is not shared")
            self._literal(1 + GETS[self._opcode])
            key = self._data[begin : self._at]
            if key in self._keys:
                raise IrregularError("a key appears twice")
            self._keys.add(key)
            self._value(key)
            layout.fields.append((key, key in layout.integers))
        if layout.tail is None:
            self._expect(SETITEMS)
        layout.size = self._at - self._begin
        if layout.size > MOST_BYTES:
            raise IrregularError("an entry is long")
        size = -(-layout.size // WORD) * WORD
        layout.mask = bytes(self._mask[:size])
        read = self._data[self._begin : self._begin + size].ljust(size, b"\0")
        layout.opcodes = bytes(a & b for a, b in zip(read, layout.mask, strict=True))
        return layout

    @property
    def _opcode(self) -> int:
        return self._data[self._at]

    def _value(self, key: bytes) -> None:
        opcode, begin = self._opcode, self._at
        if opcode in INTEGERS or opcode == LONG1:
            signed, size = self._integer()
            if self._opcode in INTEGERS or self._opcode == LONG1:
                self._integer()
                self._expect(TUPLE2)
                self.layout.written[key] = begin - self._begin, self._at - self._begin
                self._put(key)
            else:
                self.layout.integers[key] = self._at - size - self._begin, size, signed
        elif opcode in GETS:
            self._literal(1)
            self.layout.gets[key] = self._at - self._begin, GETS[opcode]
            self._at += GETS[opcode]
        elif opcode in (SHORT_BINUNICODE, BINUNICODE):
            width = 1 if opcode == SHORT_BINUNICODE else 4
            length = int.from_bytes(self._data[begin + 1 : begin + 1 + width], "little")
            self._literal(1 + width)
            self._at += length
            if self._at - self._begin > MOST_BYTES:
                raise IrregularError("an entry is long")
            self.layout.written[key] = begin - self._begin, self._at - self._begin
            self._put(key)
        elif opcode in CONSTANTS:
            self._literal(1)
            self.layout.written[key] = begin - self._begin, self._at - self._begin
        elif opcode == EMPTY_LIST:
            self._literal(1)
            self._put(key)
            self.layout.tail = key
        else:
            raise IrregularError(f"the opcode {opcode:#x} is not expected in an entry")

    def _integer(self) -> tuple[bool, int]:
        """Pass an integer. Return whether it is signed, and its bytes."""
        if self._opcode == LONG1:
            size = self._data[self._at + 1]
            if not 0 < size <= WORD:
                raise IrregularError("an integer has no bytes, or too many")
            self._literal(2)
            self._at += size
            return True, size
        size = INTEGERS[self._opcode]
        self._literal(1)
        self._at += size
        return size == 4, size

    def _put(self, key: bytes | None) -> None:
        if self._opcode not in PUTS:
            raise IrregularError("a value is not stored")
        size = PUTS[self._opcode]
        self._literal(1)
        if key is not None:
            self.layout.put_of[key] = len(self.layout.puts)
        self.layout.puts.append((self._at - self._begin, size))
        self._at += size

    def _expect(self, opcode: int) -> None:
        if self._opcode != opcode:
            raise IrregularError("an entry ends otherwise")
        self._literal(1)

    def _literal(self, size: int) -> None:
        begin = self._at - self._begin
        if begin + size > MOST_BYTES:
            raise IrregularError("an entry is long")
        self._mask[begin : begin + size] = b"\xff" * size
        self._at += size


def layout_of(data: bytes, at: int) -> Layout:
    """Return the layout of the entry at an offset.

    Raises:
        IrregularError: it has values of other kinds, more than `MOST_BYTES`, or no end.
    """
    try:
        return _Learner(data, at).learn()
    except IndexError as error:
        raise IrregularError("an entry has no end") from error
