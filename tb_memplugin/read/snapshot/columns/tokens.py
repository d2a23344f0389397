"""Tokens of the bytes that are no regular entries: that they are whole, few kinds, and what they store."""

from __future__ import annotations

import re
from typing import Protocol

from tb_memplugin.read.snapshot.columns.layout import (
    BINPUT,
    BINUNICODE,
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
    rb"(?:h.h.h.h.|j....j....j....j....|h.|j....|[}\](euast)N\x85-\x89]+|K.|M..|J....|G........|%b)+"
    % _LONGS,
    re.DOTALL,
)
"""Tokens of fixed length that store nothing, of those that picklers write for plain data. Most are gets."""


class Part(Protocol):
    """Bytes, and the offsets at which a token must end."""

    data: bytearray
    cuts: list[int]


class Tokens:
    """Counts what a pickle stores while its tokens are read, part by part.

    Args:
        memoizes: whether the pickle stores by MEMOIZE, which tells no number; else all numbers must be
            consecutive.
    """

    def __init__(self, memoizes: bool) -> None:
        self._memoizes = memoizes

    def read(self, part: Part, stored: int = 0, begin: int = 0) -> int:
        """Return how many objects are stored after a part, of `stored` before the offset `begin` in it.

        Raises:
            IrregularError: the part ends within a token, or has an opcode that no snapshot has.
        """
        at, data = begin, bytes(part.data)
        for end in (*(cut for cut in part.cuts if cut >= begin), len(data)):
            at, stored = self._to(data, at, end, stored)
            if at != end:
                raise IrregularError("a token is cut")
        return stored

    def _to(self, data: bytes, at: int, end: int, stored: int) -> tuple[int, int]:
        fixed = FIXED.match
        while at < end:
            if tokens := fixed(data, at, end):
                at = tokens.end()
                if at == end:
                    break
            opcode = data[at]
            if opcode == MEMOIZE and self._memoizes:
                at += 1
                stored += 1
            elif opcode in (SHORT_BINUNICODE, LONG1):
                at += 2 + int.from_bytes(data[at + 1 : at + 2], "little")
            elif opcode == BINUNICODE:
                at += 5 + int.from_bytes(data[at + 1 : at + 5], "little")
            elif opcode in (BINPUT, LONG_BINPUT) and not self._memoizes:
                size = PUTS[opcode]
                if int.from_bytes(data[at + 1 : at + 1 + size], "little") != stored:
                    raise IrregularError("numbers are not consecutive")
                at += 1 + size
                stored += 1
            elif opcode == PROTO and at == 0 and stored == 0:
                at += 2
            elif opcode == STOP and at == len(data) - 1:
                at += 1
            else:
                raise IrregularError(f"the opcode {opcode:#x} is in no snapshot")
        return at, stored


def get_of(number: int) -> bytes:
    """Return the get of a stored object, as picklers write it."""
    return b"h%c" % number if number < 256 else b"j" + number.to_bytes(4, "little")
