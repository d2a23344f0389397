"""The tables that events point into: devices, modules, steps, spans, the start state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from tb_memplugin.trace.kinds import Category

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
UInt64 = npt.NDArray[np.uint64]
UInt8 = npt.NDArray[np.uint8]
Bool = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.intp]
"""Rows of a table, or indices into an array, as numpy returns them."""


Array = TypeVar("Array", bound=np.ndarray)

PIECE = 1 << 16
"""How many rows are computed at once where the whole would need much memory for a moment."""


def pieces_of(rows: int) -> Iterator[slice]:
    """Yield the slices that cover so many rows, at least one."""
    return (slice(begin, min(begin + PIECE, rows)) for begin in range(0, max(rows, 1), PIECE))


def in_memory(pieces: Sequence[Array]) -> Array:
    """Return pieces of a column, of which there is one at least, as one array."""
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)  # type: ignore[return-value]


def column(kind: type[np.generic]) -> Any:
    """Return a dataclass field for a table's column: one value per row, empty by default."""
    return field(default_factory=lambda: np.empty(0, kind))


MOST_BYTES = 1 << 62
"""The sum of all sizes in a trace must be below this, so that 64-bit running sums do not overflow."""

OUTSIDE = "outside:"
"""Prefix of the key for bytes that no module owns; the operator's name follows."""

NOT_NAMED = "(not named)"
"""Key for bytes that were alive before the window and have no known owner."""

ROOT = "(root)"
"""Display name of the module with the key "", which is the model itself."""

MODULE_MARK = "tb_memplugin.module="
"""Prefix of a label that tb_memplugin's recorder put on an allocation; the module's FQN follows."""

NO_OPERATOR = "(no operator)"
"""Key for bytes that were allocated in the window outside any operator."""


@dataclass(frozen=True, slots=True)
class Device:
    """A device with memory: `name` as torch spells it ("cpu", "cuda:0"), `capacity` in bytes.

    `reserved_at_start` is the allocator's reserve in bytes before the first event. It and `capacity` are
    None if not known.
    """

    name: str
    capacity: int | None = None
    product: str = ""
    reserved_at_start: int | None = None

    @property
    def has_reserved(self) -> bool:
        """Whether the device's allocator keeps a reserve; those of the CPU and of shared memory do not."""
        return not self.name.startswith(("cpu", "shared"))


@dataclass(frozen=True, slots=True)
class Module:
    """An owner of bytes: a module by FQN, or a key for bytes without one (`outside:…`, `(not named)`).

    `parent` is the row of the enclosing module, -1 for roots; parents come before their children.
    """

    key: str
    parent: int = -1
    class_name: str = ""

    @property
    def name(self) -> str:
        """The key as people read it."""
        return self.key or ROOT

    @property
    def is_module(self) -> bool:
        """Whether the owner is a module, not `outside:<operator>` or `(not named)`."""
        return not self.key.startswith(OUTSIDE) and self.key != NOT_NAMED


def module_text(key: str) -> str:
    """Return a module's key for a sentence, where the number of one in a Sequential would seem a size."""
    return f"module {key}" if key and not key.strip("0123456789.*") else key or ROOT


class TensorMetadata(NamedTuple):
    """What a tensor is: `dtype` as torch spells it, without "torch."; `shape` and `strides` in elements."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def __str__(self) -> str:
        """Return `float32 [8, 2048]`; strides follow where the elements do not lie one after another."""
        text = f"{self.dtype} {list(self.shape)}"
        return text if self.is_contiguous else f"{text} strides {list(self.strides)}"

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie one after another, in the order of the dimensions."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return 0 in self.shape
            expected *= size
        return True


@dataclass(frozen=True, slots=True)
class Step:
    """One profiled step: its number (`ProfilerStep#N`) and span in epoch nanoseconds."""

    number: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Spans:
    """Named time ranges in epoch nanoseconds, sorted by start; columns of equal length.

    `name` is a row of the trace's modules (for calls) or a `Phase` (for phases);
    `depth` is the nesting depth, counted from the outermost; `phase` is a `Phase`.
    """

    start_ns: Int64 = column(np.int64)
    end_ns: Int64 = column(np.int64)
    name: Int32 = column(np.int32)
    depth: Int32 = column(np.int32)
    phase: UInt8 = column(np.uint8)

    def __len__(self) -> int:
        return len(self.start_ns)


@dataclass(frozen=True, slots=True)
class StartState:
    """Blocks that were alive when the window began: one row per block, columns of equal length.

    `address` is 0 where only the size is known; `label` is a row of the trace's labels
    (for example a parameter's FQN) or -1. `stack`, `stream`, `pool` and `tensor` are rows of the trace's
    tables, -1 if not known; `rounded` is the bytes that the allocator used for the block, -1 if not known;
    `pending` is 1 if the block's free was requested before the window and not yet completed. `reason` is a
    `Reason`, `module_confidence` that of `Events`.
    """

    device: UInt8 = column(np.uint8)
    address: UInt64 = column(np.uint64)
    bytes: Int64 = column(np.int64)
    category: UInt8 = column(np.uint8)
    module: Int32 = column(np.int32)
    label: Int32 = column(np.int32)
    stack: Int32 = column(np.int32)
    stream: Int32 = column(np.int32)
    pool: Int32 = column(np.int32)
    rounded: Int64 = column(np.int64)
    pending: UInt8 = column(np.uint8)
    reason: UInt8 = column(np.uint8)
    module_confidence: UInt8 = column(np.uint8)
    tensor: Int32 = column(np.int32)

    def __len__(self) -> int:
        return len(self.bytes)


@dataclass(frozen=True, slots=True)
class Events:
    """Allocator events in time order: one row per event, columns of equal length.

    `bytes` are the requested bytes, never negative; `kind` tells whether they are added or removed.
    `operator`, `module`, `label`, `stack`, `stream`, `pool`, `context` and `tensor` are rows of the trace's
    tables, -1 for none; for frees they describe where the free happened, where that is known.
    `forward` is the stack of the forward call that belongs to this backward, a row of `stacks`.
    `category` and `reason` (a `Reason`) have a meaning for allocations only. `reserved` is the allocator's
    reserve in bytes after the event, -1 where the device has none. `rounded` is the bytes that the allocator
    used for an allocated block, -1 if not known. `module_confidence` says how sure it is that `module` is the
    block's, in percent: 100 where this was recorded, less where it was inferred.
    """

    time_ns: Int64 = column(np.int64)
    kind: UInt8 = column(np.uint8)
    device: UInt8 = column(np.uint8)
    address: UInt64 = column(np.uint64)
    bytes: Int64 = column(np.int64)
    operator: Int32 = column(np.int32)
    module: Int32 = column(np.int32)
    label: Int32 = column(np.int32)
    stack: Int32 = column(np.int32)
    phase: UInt8 = column(np.uint8)
    category: UInt8 = column(np.uint8)
    reserved: Int64 = column(np.int64)
    stream: Int32 = column(np.int32)
    pool: Int32 = column(np.int32)
    context: Int32 = column(np.int32)
    forward: Int32 = column(np.int32)
    rounded: Int64 = column(np.int64)
    reason: UInt8 = column(np.uint8)
    module_confidence: UInt8 = column(np.uint8)
    tensor: Int32 = column(np.int32)

    def __len__(self) -> int:
        return len(self.time_ns)

    def kept(self, pieces: Callable[[], Iterable[Array]]) -> Array:
        """Return the pieces of a column that is computed from these events as one: here in memory."""
        return in_memory(list(pieces()))


Table = TypeVar("Table", Events, StartState)
Timed = TypeVar("Timed")


def differences(series: Int64) -> Int64:
    """Return the first value of each row, then each value minus the one before: same shape.

    `np.diff(series, prepend=0)` is the same and, on the short columns of a step, takes several times as long.
    """
    steps: Int64 = series.copy()
    steps[..., 1:] -= series[..., :-1]
    return steps


def ranges(first: Rows | Int32, end: Rows | Int32) -> Rows:
    """Return the integers of each range from `first` to before `end`, one range after another: intp."""
    count = end - first
    offset: Rows = np.repeat(first - (np.cumsum(count) - count), count)
    return offset + np.arange(len(offset))


DEEPEST = 1 << 11
"""More modules than this are not in each other: Python's calls end before."""


def is_too_deep(parents: npt.ArrayLike) -> bool:
    """Whether a row of a table has `DEEPEST` others above it. A path for each would fill the memory.

    Args:
        parents: the row above each row, -1 for none.

    Raises:
        IndexError: a row is not in the table.
    """
    above = np.append(np.asarray(parents, np.int64), -1)
    for _ in range(DEEPEST.bit_length() - 1):  # each time twice as far up
        above = above[above]
    return bool((above >= 0).any())


def code_mask(codes: Iterable[int]) -> Bool:
    """Return which codes of one byte are among these: bool, shape (256,), to be indexed by a column of codes.

    `np.isin` is the same and, on the short columns of a step, takes ten times as long.
    """
    mask = np.zeros(256, bool)
    mask[list(codes)] = True
    return mask


EVENT_DTYPES: dict[str, np.dtype[np.generic]] = {
    name: getattr(Events(), name).dtype for name in Events.__slots__
}
"""The dtype of each column of `Events`, in the order of its fields."""

START_DTYPES: dict[str, np.dtype[np.generic]] = {
    name: getattr(StartState(), name).dtype for name in StartState.__slots__
}
"""The dtype of each column of `StartState`, in the order of its fields."""

CERTAIN = 100
"""The `module_confidence` of modules that were recorded; of inferred ones it is less, in percent."""

ABSENT: dict[str, int] = {
    **dict.fromkeys(
        ("operator", "module", "label", "stack", "stream", "pool", "context", "forward", "tensor"), -1
    ),
    "reserved": -1,
    "rounded": -1,
    "category": Category.UNKNOWN,
    "module_confidence": CERTAIN,
}
"""Values for columns of `Events` or `StartState` that a source does not know; 0 for columns not listed."""


def events(time_ns: npt.ArrayLike, **columns: npt.ArrayLike) -> Events:
    """Return `Events` from the given columns; the others are filled with the values of `ABSENT`, else 0.

    Args:
        time_ns: shape (n,), epoch nanoseconds, not decreasing.
        columns: any other field of `Events`, shape (n,), cast to its dtype.

    Raises:
        TypeError: a column that `Events` does not have.
        ValueError: columns of different lengths.
    """
    return _filled(Events, EVENT_DTYPES, {"time_ns": time_ns, **columns})


def start_state(size: npt.ArrayLike, **columns: npt.ArrayLike) -> StartState:
    """Return `StartState` from the given columns; the others are filled with the values of `ABSENT`, else 0.

    Args:
        size: shape (n,), the column `bytes`: the requested bytes of each block.
        columns: any other field of `StartState`, shape (n,), cast to its dtype.

    Raises:
        TypeError: a column that `StartState` does not have.
        ValueError: columns of different lengths.
    """
    return _filled(StartState, START_DTYPES, {"bytes": size, **columns})


def merged(first: Timed, *more: Timed) -> Timed:
    """Return the rows of tables in the order of their `time_ns`, at equal times in this order."""
    kind: Any = type(first)
    columns = {
        name: np.concatenate([getattr(table, name) for table in (first, *more)]) for name in kind.__slots__
    }
    order = np.argsort(columns["time_ns"], kind="stable")
    rows: Timed = kind(**{name: column[order] for name, column in columns.items()})
    return rows


def compact(column: Array) -> Array:
    """Return a column; if all its rows have one value, read-only and without memory for each row."""
    if not len(column) or column.strides == (0,) or column[0] != column[-1] or (column != column[0]).any():
        return column
    return np.broadcast_to(column[0], column.shape)  # type: ignore[return-value]


def _filled(
    kind: type[Table], dtypes: dict[str, np.dtype[np.generic]], columns: dict[str, npt.ArrayLike]
) -> Table:
    unknown = columns.keys() - dtypes.keys()
    if unknown:
        raise TypeError(f"{kind.__name__} has no column {sorted(unknown)}")
    key = next(iter(columns))
    shape = np.shape(columns[key])
    filled: dict[str, npt.NDArray[np.generic]] = {}
    for name, dtype in dtypes.items():
        present = name in columns
        column = np.asarray(columns[name], dtype) if present else np.full(shape, ABSENT.get(name, 0), dtype)
        if column.shape != shape:
            raise ValueError(f"column {name} has shape {column.shape}, {key} has {shape}")
        filled[name] = column
    return kind(**filled)  # type: ignore[arg-type]  # one array a field, dtypes from the table
