"""The tables that events point into: devices, modules, steps, spans, the start state."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Int64 = npt.NDArray[np.int64]
Int32 = npt.NDArray[np.int32]
UInt64 = npt.NDArray[np.uint64]
UInt8 = npt.NDArray[np.uint8]
Bool = npt.NDArray[np.bool_]

OUTSIDE = "outside:"
"""Prefix of the key of bytes that no module owns; the operator's name follows."""

NOT_NAMED = "(not named)"
"""Key of what was alive before the window and has no known owner."""

NO_OPERATOR = "(no operator)"
"""Key of bytes born in the window with no operator around them."""


@dataclass(frozen=True, slots=True)
class Device:
    """One memory: `name` as torch spells it ("cpu", "cuda:0"), `capacity` in bytes or None if not known."""

    name: str
    capacity: int | None = None
    product: str = ""

    @property
    def has_reserved(self) -> bool:
        """Whether the device's allocator keeps a reserve (the CPU's does not)."""
        return not self.name.startswith(("cpu", "shared"))


@dataclass(frozen=True, slots=True)
class Module:
    """An owner of bytes: a module by FQN, or a key that stands for none (`outside:…`, `(not named)`).

    `parent` is the row of the enclosing module, -1 for roots; parents come before their children.
    """

    key: str
    parent: int = -1
    class_name: str = ""

    @property
    def is_module(self) -> bool:
        """False for `outside:<operator>` and for what has no known owner."""
        return not self.key.startswith(OUTSIDE) and self.key != NOT_NAMED


@dataclass(frozen=True, slots=True)
class Step:
    """One profiled step: its number (`ProfilerStep#N`) and span in epoch nanoseconds."""

    number: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Spans:
    """Named stretches of time, sorted by start. Columns of one length, epoch nanoseconds.

    `name` is a row of the trace's modules (for calls) or a `Phase` (for phases);
    `depth` counts from the outermost, `phase` is a `Phase`.
    """

    start_ns: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    end_ns: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    name: Int32 = field(default_factory=lambda: np.empty(0, np.int32))
    depth: Int32 = field(default_factory=lambda: np.empty(0, np.int32))
    phase: UInt8 = field(default_factory=lambda: np.empty(0, np.uint8))

    def __len__(self) -> int:
        return len(self.start_ns)


@dataclass(frozen=True, slots=True)
class StartState:
    """What was alive when the window began: one row a block, columns of one length.

    `address` is 0 where only the size is known; `label` is a row of the trace's labels
    (a parameter's FQN, say) or -1.
    """

    device: UInt8 = field(default_factory=lambda: np.empty(0, np.uint8))
    address: UInt64 = field(default_factory=lambda: np.empty(0, np.uint64))
    bytes: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    category: UInt8 = field(default_factory=lambda: np.empty(0, np.uint8))
    module: Int32 = field(default_factory=lambda: np.empty(0, np.int32))
    label: Int32 = field(default_factory=lambda: np.empty(0, np.int32))

    def __len__(self) -> int:
        return len(self.bytes)


@dataclass(frozen=True, slots=True)
class Events:
    """Allocator events in time order, one row an event, columns of one length.

    `bytes` is never negative: `kind` says which way it counts. `operator`, `module`, `label` and
    `stack` are rows of the trace's tables, -1 for none; on frees they say where the free happened,
    as far as that is known. `category` has a meaning on allocations only. `reserved` is the
    allocator's reserve after the event, -1 where the device has none.
    """

    time_ns: Int64
    kind: UInt8
    device: UInt8
    address: UInt64
    bytes: Int64
    operator: Int32
    module: Int32
    label: Int32
    stack: Int32
    phase: UInt8
    category: UInt8
    reserved: Int64

    def __len__(self) -> int:
        return len(self.time_ns)


EVENT_DTYPES: dict[str, np.dtype[np.generic]] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "time_ns": np.int64,
        "kind": np.uint8,
        "device": np.uint8,
        "address": np.uint64,
        "bytes": np.int64,
        "operator": np.int32,
        "module": np.int32,
        "label": np.int32,
        "stack": np.int32,
        "phase": np.uint8,
        "category": np.uint8,
        "reserved": np.int64,
    }.items()
}
"""The dtype of each column of `Events`, in the order of its fields."""

_ABSENT = {"operator": -1, "module": -1, "label": -1, "stack": -1, "reserved": -1, "category": 11}


def events(time_ns: npt.ArrayLike, **columns: npt.ArrayLike) -> Events:
    """`Events` from the columns at hand; a column that is not given is filled with "none".

    Args:
        time_ns: shape (n,), epoch nanoseconds, not decreasing.
        columns: any other field of `Events`, shape (n,), cast to its dtype.

    Raises:
        TypeError: a column that `Events` does not have.
        ValueError: columns of different lengths.
    """
    unknown = columns.keys() - EVENT_DTYPES.keys()
    if unknown:
        raise TypeError(f"Events has no column {sorted(unknown)}")
    time = np.asarray(time_ns, np.int64)
    filled: dict[str, npt.NDArray[np.generic]] = {"time_ns": time}
    for name, dtype in EVENT_DTYPES.items():
        if name == "time_ns":
            continue
        column = (
            np.asarray(columns[name], dtype)
            if name in columns
            else np.full(len(time), _ABSENT.get(name, 0), dtype)
        )
        if column.shape != time.shape:
            raise ValueError(f"column {name} has shape {column.shape}, time_ns has {time.shape}")
        filled[name] = column
    return Events(**filled)  # type: ignore[arg-type]  # one array a field, dtypes from EVENT_DTYPES
