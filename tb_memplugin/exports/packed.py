"""Columns of integers as compact text for an HTML page: deflated bytes in base64."""

from __future__ import annotations

import base64
import zlib
from typing import TypedDict

import numpy as np
import numpy.typing as npt

LEVEL = 6


class Packed(TypedDict):
    """A column: `count` values of `width` bytes each in `data`. frontend/src/report/packed.ts unpacks it."""

    count: int
    width: int
    data: str


def pack(values: npt.ArrayLike) -> Packed:
    """Pack signed 64-bit integers: all lowest bytes, then all second bytes, ..., deflated, in base64.

    High bytes that only repeat the sign in every value are left out; `width` is how many bytes are written.
    """
    column = np.ascontiguousarray(values, "<i8")
    width = _width(column)
    planes = column.view(np.uint8).reshape(-1, 8)[:, :width].T
    data = base64.b64encode(zlib.compress(planes.tobytes(), LEVEL)).decode()
    return {"count": len(column), "width": width, "data": data}


def pack_steps(values: npt.ArrayLike) -> Packed:
    """Pack values that change little: the first value, then the difference of each to the one before."""
    column = np.asarray(values, np.int64)
    return pack(np.diff(column, prepend=np.int64(0)))


def _width(column: npt.NDArray[np.int64]) -> int:
    """Return how many bytes hold every value with its sign."""
    if not len(column):
        return 1
    highest = max(int(column.max()), -1 - int(column.min()))
    return min(8, highest.bit_length() // 8 + 1)
