"""Tokens of the bytes that are no regular entries: that they are whole, few kinds, and what they store."""

from __future__ import annotations

import re
from typing import Protocol

from tb_memplugin.read.snapshot.columns.layout import (
    BINPUT,
    BINUNICODE,
    GETS,
    LONG1,
    LONG_BINPUT,
    MEMOIZE,
    SHORT_BINUNICODE,
    IrregularError,
)

LENGTHS = [0] * 256
"""Bytes of each opcode with its argument, of those that picklers write for plain data; 0 for all others."""
for _length, _opcodes in {1: b"}](euast)N\x85\x86\x87\x88\x89", 2: b"K", 3: b"M", 5: b"J", 9: b"G"}.items():
    for _opcode in _opcodes:
        LENGTHS[_opcode] = _length

STOP = b"."[0]
RUN_OF_GETS = re.compile(rb"(?:h.|j.{4})+", re.DOTALL)


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

    def read(self, part: Part, stored: int = 0) -> int:
        """Return how many objects are stored after a part, of `stored` before it.

        Raises:
            IrregularError: the part ends within a token, or has an opcode that no snapshot has.
        """
        at, data = 0, bytes(part.data)
        for end in (*part.cuts, len(data)):
            at, stored = self._to(data, at, end, stored)
            if at != end:
                raise IrregularError("a token is cut")
        return stored

    def _to(self, data: bytes, at: int, end: int, stored: int) -> tuple[int, int]:
        while at < end:
            opcode = data[at]
            if length := LENGTHS[opcode]:
                at += length
            elif opcode == MEMOIZE and self._memoizes:
                at += 1
                stored += 1
            elif opcode in GETS:
                gets = RUN_OF_GETS.match(data, at, end)
                if gets is None:
                    raise IrregularError("a token is cut")
                at = gets.end()
            elif opcode in (SHORT_BINUNICODE, LONG1):
                at += 2 + int.from_bytes(data[at + 1 : at + 2], "little")
            elif opcode == BINUNICODE:
                at += 5 + int.from_bytes(data[at + 1 : at + 5], "little")
            elif opcode in (BINPUT, LONG_BINPUT) and not self._memoizes:
                size = 1 if opcode == BINPUT else 4
                if int.from_bytes(data[at + 1 : at + 1 + size], "little") != stored:
                    raise IrregularError("numbers are not consecutive")
                at += 1 + size
                stored += 1
            elif opcode == 0x80 and not at and not stored:
                at += 2
            elif opcode == STOP and at == len(data) - 1:
                at += 1
            else:
                raise IrregularError(f"the opcode {opcode:#x} is in no snapshot")
        return at, stored


def get_of(number: int) -> bytes:
    """Return the get of a stored object, as picklers write it."""
    return b"h%c" % number if number < 256 else b"j" + number.to_bytes(4, "little")
