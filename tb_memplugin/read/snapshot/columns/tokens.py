"""Tokens of the bytes that are no regular entries: that they are whole, few kinds, and what they store."""

from __future__ import annotations

import re
from typing import Protocol

from tb_memplugin.read.snapshot.columns.layout import (
    BINPUT,
    BINUNICODE,
    EMPTY_LIST,
    LONG1,
    LONG_BINPUT,
    MEMOIZE,
    PUTS,
    SHORT_BINUNICODE,
    IrregularError,
)

STOP, PROTO = b"."[0], 0x80
_LONGS = b"|".join(b"\x8a%c" % size + b"." * size for size in range(1, 9))
FIXED = re.compile(
    rb"(?:h.h.h.h.|j....j....j....j....|h.|j....|[}(euast)N\x85-\x89]+|K.|M..|J....|G........|%b)+" % _LONGS,
    re.DOTALL,
)
"""Tokens of fixed length that store nothing, of those that picklers write for plain data. Most are gets."""

LIST_OF_GETS = re.compile(rb"(?:\((?:h.|j.{4})+e|(?:h.|j.{4})a)?", re.DOTALL)
"""The rest of a list behind its put."""

LAST_VALUE, LONGEST_SHARED = b"eu", 2048
"""How a list ends that is a dict's last value, and the most bytes of one that is compared with others."""


class Part(Protocol):
    """Bytes, and the offsets at which a token must end."""

    data: bytearray
    cuts: list[int]


class Tokens:
    """Counts what a pickle stores while its tokens are read, part by part.

    A part has a get in place of a list of the same gets as one before, stored under its own number, too: the
    blocks of a snapshot have few stacks. `shared` has the number of each such list, by its gets.

    Args:
        memoizes: whether the pickle stores by MEMOIZE, which tells no number; else all numbers must be
            consecutive.
    """

    def __init__(self, memoizes: bool) -> None:
        self._memoizes = memoizes
        self.shared: dict[bytes, int] = {}
        self._lists: dict[bytes, int] = {}
        self._kept, self._left = bytearray(), 0

    def read(self, part: Part, stored: int = 0, begin: int = 0) -> int:
        """Return how many objects are stored after a part, of `stored` before the offset `begin` in it.

        Raises:
            IrregularError: the part ends within a token, or has an opcode that no snapshot has.
        """
        at, data = begin, bytes(part.data)
        self._kept, self._left = bytearray(), begin
        for end in (*(cut for cut in part.cuts if cut >= begin), len(data)):
            at, stored = self._to(data, at, end, stored)
            if at != end:
                raise IrregularError("a token is cut")
        part.cuts.clear()
        if self._kept:
            part.data[begin:] = self._kept + data[self._left :]
        return stored

    def _to(self, data: bytes, at: int, end: int, stored: int) -> tuple[int, int]:
        fixed, opened = FIXED.match, -1
        while at < end:
            if tokens := fixed(data, at, end):
                at = tokens.end()
                if at == end:
                    break
            opcode = data[at]
            if opcode == EMPTY_LIST:
                opened = at = at + 1
            elif opcode == MEMOIZE and self._memoizes:
                at = self._list(data, at, at + 1, end, stored) if opened == at else at + 1
                stored += 1
            elif opcode in (SHORT_BINUNICODE, LONG1):
                at += 2 + int.from_bytes(data[at + 1 : at + 2], "little")
            elif opcode == BINUNICODE:
                at += 5 + int.from_bytes(data[at + 1 : at + 5], "little")
            elif opcode in (BINPUT, LONG_BINPUT) and not self._memoizes:
                size = PUTS[opcode]
                if int.from_bytes(data[at + 1 : at + 1 + size], "little") != stored:
                    raise IrregularError("numbers are not consecutive")
                at = self._list(data, at, at + 1 + size, end, stored) if opened == at else at + 1 + size
                stored += 1
            elif opcode == PROTO and at == 0 and stored == 0:
                at += 2
            elif opcode == STOP and at == len(data) - 1:
                at += 1
            else:
                raise IrregularError(f"the opcode {opcode:#x} is in no snapshot")
        return at, stored

    def _list(self, data: bytes, put: int, at: int, end: int, number: int) -> int:
        """Return where a list's gets end that another has, else where they begin, behind the put."""
        close = data.find(LAST_VALUE, at, min(end, at + LONGEST_SHARED)) + 1
        gets = data[at:close]
        first = self._lists.get(gets)
        if first is not None:
            self.shared[gets] = first
            self._kept += data[self._left : put - 1] + get_of(first) + data[put:at]
            self._left = close
            return close
        if close and LIST_OF_GETS.fullmatch(gets):
            self._lists[gets] = number
        return at


def get_of(number: int) -> bytes:
    """Return the get of a stored object, as picklers write it."""
    return b"h%c" % number if number < 256 else b"j" + number.to_bytes(4, "little")
