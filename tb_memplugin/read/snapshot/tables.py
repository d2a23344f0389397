"""The tables that a snapshot's entries and blocks refer to, filled while it is read."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from typing import Any, TypeVar

import numpy as np

from tb_memplugin.read.python_frames import is_watched_call
from tb_memplugin.read.snapshot.numbers import addresses, count_none, rows_of_numbers
from tb_memplugin.read.tables import Names
from tb_memplugin.trace.tables import Int32, Int64

Frames = Sequence[dict[str, Any]]

LISTS_AT_ONCE = 1 << 14
FRAME_FIELDS = ("name", "filename", "line", "fx_node_name", "fx_node_op", "fx_node_target")
MOST_FRAMES = 1 << 17
"""The largest number of frames in a stack; a small hostile file may repeat one frame millions of times."""

MOST_CHARACTERS = 1 << 28
"""The largest total length of all distinct frames: a file may share names that the texts repeat."""

POINTER_BYTES = np.dtype(object).itemsize


class Stacks:
    """The distinct call stacks, each a tuple of frames `function file:line`, innermost first.

    If a compiled graph's node was recorded, a frame ends in ` [fx NAME OP TARGET]`.

    A snapshot contains one list of frames per allocation: millions of references to few frames. Equal
    stacks are found by the addresses of their frames, so the snapshot must exist as long as this object.
    """

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}
        self._kept_texts: dict[str, str] = {}
        self._characters = 0
        self._by_frames: dict[bytes, int] = {b"": -1}
        self._rows: dict[tuple[str, ...], int] = {}

    def as_tuple(self) -> tuple[tuple[str, ...], ...]:
        """Return all stacks in row order."""
        return tuple(self._rows)

    def rows(self, written: Sequence[Frames | None]) -> Int32:
        """Return the rows of stacks; -1 for None or an empty stack.

        Raises:
            KeyError, TypeError, ValueError: a stack is not a valid list of frames.
        """
        return _once_an_object(written, self._rows_of)

    def text_rows(self, written: Sequence[Sequence[str] | None]) -> Int32:
        """Return the rows of stacks that are written as strings (`forward_frames`); -1 for None or empty.

        Raises:
            TypeError: a stack is not a list of strings.
            ValueError: a stack has too many frames.
        """
        if written.count(None) == len(written):
            return np.full(len(written), -1, np.int32)
        return _once_an_object(written, lambda some: list(map(self._text_row, some)))

    def _text_row(self, frames: Sequence[str] | None) -> int:
        if not frames:
            return -1
        if not isinstance(frames, list | tuple) or not all(isinstance(frame, str) for frame in frames):
            raise TypeError("forward_frames is not a list of strings")
        if len(frames) > MOST_FRAMES:
            raise ValueError(f"a stack has {len(frames):,} frames")
        return self._rows.setdefault(tuple(frames), len(self._rows))

    def _rows_of(self, lists: list[Frames]) -> list[int]:
        rows: list[int] = []
        by_frames = self._by_frames
        for first in range(0, len(lists), LISTS_AT_ONCE):
            some = lists[first : first + LISTS_AT_ONCE]
            lengths = list(map(len, some))
            if max(lengths) > MOST_FRAMES:
                raise ValueError(f"a stack has {max(lengths):,} frames")
            ends = list(accumulate(lengths, initial=0))
            # The bytes of an object array are the objects' addresses; a slice of them is a stack's key.
            raw = np.fromiter(chain.from_iterable(some), object, ends[-1]).tobytes()
            keys = [raw[a * POINTER_BYTES : b * POINTER_BYTES] for a, b in pairwise(ends)]
            for key, frames in dict(zip(keys, some, strict=True)).items():
                if key not in by_frames:
                    stack = tuple(filter(None, self._texts_of(frames)))
                    by_frames[key] = self._rows.setdefault(stack, len(self._rows))
            rows += map(by_frames.__getitem__, keys)
        return rows

    def _texts_of(self, frames: Frames) -> list[str | None]:
        """Return the texts of frames, empty ones for those of ours."""
        texts = list(map(self._texts.get, map(id, frames)))
        for index, text in enumerate(texts):
            if text is None:
                written = self._kept(_text(frames[index]))
                texts[index] = self._texts[id(frames[index])] = "" if is_watched_call(written) else written
        return texts

    def _kept(self, text: str) -> str:
        """Return the one stored text that is equal to the given text."""
        kept = self._kept_texts.setdefault(text, text)
        if kept is text:
            self._characters += len(text)
            if self._characters > MOST_CHARACTERS:
                raise ValueError("its frames have more text than any program has")
        return kept


def _once_an_object(written: Sequence[Any], rows_of: Callable[[list[Any]], list[int]]) -> Int32:
    """Return the rows of values, calling `rows_of` once per distinct object, in order of first appearance."""
    ids = np.fromiter(map(id, written), np.uint64, len(written))
    _, first, same = np.unique(ids, return_index=True, return_inverse=True)
    in_order = np.argsort(first)
    rows = np.empty(len(first), np.int32)
    rows[in_order] = rows_of([written[index] or () for index in first[in_order].tolist()])
    return rows[same]


def _text(frame: dict[str, Any]) -> str:
    _check_frame(frame)
    text = f"{frame['name']} {frame['filename']}:{frame['line']}"
    if frame.get("fx_node_name"):
        fields = (frame.get(f"fx_node_{part}") for part in ("name", "op", "target"))
        text += f" [fx {' '.join(str(part) for part in fields if part)}]"
    return text


def _check_frame(frame: dict[str, Any]) -> None:
    """Check that a frame contains only plain values: the text of nested lists could be endless."""
    for key in FRAME_FIELDS:
        value = frame.get(key)
        if not (value is None or type(value) is str or (type(value) is int and abs(value) < 1 << 64)):
            raise TypeError(f"the {key} of a frame is {type(value).__name__}")


T = TypeVar("T", bound=Hashable)

LONGEST_NAME = 4096
"""The largest number of characters of a label, context or annotation name: one may be repeated many times."""

CUT = "…"


@dataclass(frozen=True, slots=True)
class Tables:
    """Rows of all devices of one snapshot: labels, compile contexts, stacks, stream pointers, pool ids."""

    labels: Names = field(default_factory=Names)
    contexts: Names = field(default_factory=Names)
    stacks: Stacks = field(default_factory=Stacks)
    streams: dict[int, int] = field(default_factory=dict)
    pools: dict[tuple[int, int], int] = field(default_factory=dict)

    def label_rows(self, written: Sequence[Any]) -> Int32:
        """Return the rows of `user_metadata`, -1 for none."""
        return _text_rows(
            written, "user_metadata or category", lambda label: self.labels.add(cut(label)) if label else -1
        )

    def context_rows(self, written: Sequence[Any]) -> Int32:
        """Return the rows of `compile_context`, -1 for none; PyTorch writes N/A if nothing is compiled."""
        return _text_rows(
            written,
            "compile_context",
            lambda context: self.contexts.add(cut(context)) if context and context != "N/A" else -1,
        )

    def stream_rows(self, written: Sequence[Any] | Int64) -> Int32:
        """Return the rows of stream pointers, -1 for none."""
        return _rows_of_present(
            written,
            lambda values: rows_of_numbers(
                [addresses(values, "stream")], lambda stream: _row(self.streams, stream)
            ),
        )

    def pool_rows(self, written: Sequence[Any]) -> Int32:
        """Return the rows of pool ids, which are pairs of numbers (lists of two in JSON); -1 for none."""
        return _rows_of_present(written, self._pool_rows)

    def _pool_rows(self, written: Sequence[Any] | Int64) -> Int32:
        if set(map(type, written)) - {tuple, list} or set(map(len, written)) != {2}:
            raise TypeError("a pool id is not a pair of numbers")
        first, second = addresses(list(chain.from_iterable(written)), "a pool id").reshape(-1, 2).T
        return rows_of_numbers([first, second], lambda a, b: _row(self.pools, (a, b)))


def cut(name: str) -> str:
    """Return a name cut to `LONGEST_NAME` characters."""
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - len(CUT)] + CUT


def is_cut(name: str) -> bool:
    """Whether a name looks like one that was cut."""
    return len(name) == LONGEST_NAME and name.endswith(CUT)


def check_texts(written: Sequence[Any], field_name: str) -> None:
    """Check that values are strings or None, before anything hashes them.

    Raises:
        TypeError: a value has another type.
    """
    for kind in set(map(type, written)) - {str, type(None)}:
        raise TypeError(f"{field_name} is {kind.__name__}")


def _text_rows(written: Sequence[Any], field_name: str, row_of: Callable[[Any], int]) -> Int32:
    """Return a row for each text, calling `row_of` once per distinct text: int32, shape (values,)."""
    check_texts(written, field_name)
    rows = {text: row_of(text) for text in dict.fromkeys(written)}
    if len(rows) == 1:
        return np.full(len(written), next(iter(rows.values())), np.int32)
    return np.fromiter(map(rows.__getitem__, written), np.int32, len(written))


def _rows_of_present(
    written: Sequence[Any] | Int64, rows_of: Callable[[Sequence[Any] | Int64], Int32]
) -> Int32:
    absent = count_none(written)
    if not absent and len(written):
        return rows_of(written)
    rows = np.full(len(written), -1, np.int32)
    if absent < len(written):
        present = [row for row, value in enumerate(written) if value is not None]
        rows[present] = rows_of([written[row] for row in present])
    return rows


def _row(rows: dict[T, int], key: T) -> int:
    return rows.setdefault(key, len(rows))
