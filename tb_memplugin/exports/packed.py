"""Columns of integers as short text for a page: deflated bytes, in base64."""

from __future__ import annotations

import base64
import zlib
from typing import TypedDict

import numpy as np
import numpy.typing as npt

LEVEL = 6


class Packed(TypedDict):
    """A column: `count` values, `width` bytes each, in `data`. Unpacked by frontend/src/report/packed.ts."""

    count: int
    width: int
    data: str


def pack(values: npt.ArrayLike) -> Packed:
    """Signed 64-bit integers: all lowest bytes first, then all second bytes, ..., deflated, in base64.

    Planes that hold nothing but a sign are not written: `width` is how many there are.
    """
    column = np.ascontiguousarray(values, "<i8")
    width = _width(column)
    planes = column.view(np.uint8).reshape(-1, 8)[:, :width].T
    data = base64.b64encode(zlib.compress(planes.tobytes(), LEVEL)).decode()
    return {"count": len(column), "width": width, "data": data}


def pack_steps(values: npt.ArrayLike) -> Packed:
    """The same for values that change little: the first one, then each one's difference to the one before."""
    column = np.asarray(values, np.int64)
    return pack(np.diff(column, prepend=np.int64(0)))


def _width(column: npt.NDArray[np.int64]) -> int:
    """Bytes that hold every value with its sign."""
    if not len(column):
        return 1
    highest = max(int(column.max()), -1 - int(column.min()))
    return min(8, highest.bit_length() // 8 + 1)
