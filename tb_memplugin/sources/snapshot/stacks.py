"""The call stacks of a memory snapshot, each once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any

import numpy as np

from tb_memplugin.trace.tables import Int32

Frames = Sequence[dict[str, Any]]

LISTS_AT_ONCE = 1 << 14
FRAME_FIELDS = ("name", "filename", "line", "fx_node_name", "fx_node_op", "fx_node_target")
MOST_FRAMES = 1 << 17
"""Of one stack: none is so deep, and a file may have one frame a million times in a few bytes."""

MOST_CHARACTERS = 1 << 28
"""Of all different frames: names may be shared in a file, and no longer be in their texts."""

POINTER_BYTES = np.dtype(object).itemsize


class Stacks:
    """Call stacks, each once, as `function file:line`, innermost frame first.

    Where a compiled graph's node was recorded, a frame ends in ` [fx NAME OP TARGET]`.

    A snapshot holds one list of frames per allocation, millions of references to few frames. Equal
    stacks are found by the addresses of their frames, so the snapshot must live as long as this does.
    """

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}
        self._kept_texts: dict[str, str] = {}
        self._characters = 0
        self._by_frames: dict[bytes, int] = {b"": -1}
        self._rows: dict[tuple[str, ...], int] = {}

    def as_tuple(self) -> tuple[tuple[str, ...], ...]:
        """All stacks, in row order."""
        return tuple(self._rows)

    def rows(self, written: Sequence[Frames | None]) -> Int32:
        """The rows of stacks; -1 for none or an empty one.

        Raises:
            KeyError, TypeError, ValueError: a stack is no list of frames.
        """
        return _once_an_object(written, self._rows_of)

    def text_rows(self, written: Sequence[Sequence[str] | None]) -> Int32:
        """The rows of stacks that are written as texts (`forward_frames`); -1 for none.

        Raises:
            TypeError: a stack is no list of texts.
        """
        if written.count(None) == len(written):
            return np.full(len(written), -1, np.int32)
        return _once_an_object(written, lambda some: list(map(self._text_row, some)))

    def _text_row(self, frames: Sequence[str] | None) -> int:
        if not frames:
            return -1
        if not isinstance(frames, list | tuple) or not all(isinstance(frame, str) for frame in frames):
            raise TypeError("forward_frames are no list of texts")
        if len(frames) > MOST_FRAMES:
            raise ValueError(f"a stack has {len(frames):,} frames")
        return self._rows.setdefault(tuple(frames), len(self._rows))

    def _rows_of(self, lists: list[Frames]) -> list[int]:
        rows: list[int] = []
        known = self._by_frames
        for first in range(0, len(lists), LISTS_AT_ONCE):
            some = lists[first : first + LISTS_AT_ONCE]
            lengths = list(map(len, some))
            if max(lengths) > MOST_FRAMES:
                raise ValueError(f"a stack has {max(lengths):,} frames")
            ends = list(accumulate(lengths, initial=0))
            # The bytes of an array of objects are the objects' addresses: a stack's key is one slice of them.
            raw = np.fromiter(chain.from_iterable(some), object, ends[-1]).tobytes()
            keys = [raw[a * POINTER_BYTES : b * POINTER_BYTES] for a, b in pairwise(ends)]
            for key, frames in dict(zip(keys, some, strict=True)).items():
                if key not in known:
                    stack = tuple(map(self._text, frames))
                    known[key] = self._rows.setdefault(stack, len(self._rows))
            rows += map(known.__getitem__, keys)
        return rows

    def _text(self, frame: dict[str, Any]) -> str:
        text = self._texts.get(id(frame))
        if text is None:
            _check_frame(frame)
            text = f"{frame['name']} {frame['filename']}:{frame['line']}"
            if frame.get("fx_node_name"):
                told = (frame.get(f"fx_node_{part}") for part in ("name", "op", "target"))
                text += f" [fx {' '.join(str(part) for part in told if part)}]"
            text = self._texts[id(frame)] = self._kept(text)
        return text

    def _kept(self, text: str) -> str:
        """The text that stands for all that are equal to it."""
        kept = self._kept_texts.setdefault(text, text)
        if kept is text:
            self._characters += len(text)
            if self._characters > MOST_CHARACTERS:
                raise ValueError("its frames have more text than any program's")
        return kept


def _once_an_object(written: Sequence[Any], rows_of: Callable[[list[Any]], list[int]]) -> Int32:
    """Rows of values, asked for once an object, by first appearance: addresses differ from run to run."""
    places = np.fromiter(map(id, written), np.uint64, len(written))
    _, first, same = np.unique(places, return_index=True, return_inverse=True)
    seen = np.argsort(first)
    rows = np.empty(len(first), np.int32)
    rows[seen] = rows_of([written[place] or () for place in first[seen].tolist()])
    return rows[same]


def _check_frame(frame: dict[str, Any]) -> None:
    """Make sure that a frame holds plain values: the text of a list of lists may have no end."""
    for key in FRAME_FIELDS:
        value = frame.get(key)
        if not (value is None or type(value) is str or (type(value) is int and abs(value) < 1 << 64)):
            raise TypeError(f"the {key} of a frame is {type(value).__name__}")
