"""Tiny allocator histories, a line an event, with places that a person can draw on paper.

    allocator_trace("held 16M 2M", "live 16M 600", "alloc 17M 512", "free_requested 16M 600")

`held` is a segment and `live` a block of before the window. Sizes and addresses may end in K or M.
Options: stream, pool, rounded, stack, device (numbers), expandable, pending (0 or 1). Stream 0 is the default
stream and pool 0 the default pool; stream 1 and pool 1 are others. Events are a microsecond apart.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tb_memplugin.trace import (
    Device,
    Kind,
    MemoryTrace,
    Module,
    OutOfMemory,
    Segments,
    Step,
    events,
    start_state,
)
from tb_memplugin.trace.tables import NOT_NAMED
from tests.traces import EPOCH, MICROSECOND, trace

K, M = 1 << 10, 1 << 20
POOLS = ((0, 0), (7, 1))
STREAMS = (0, 0xABC0)
KINDS = {
    "alloc": Kind.ALLOC,
    "free_requested": Kind.FREE_REQUESTED,
    "free_completed": Kind.FREE_COMPLETED,
    "segment_alloc": Kind.SEGMENT_ALLOC,
    "segment_free": Kind.SEGMENT_FREE,
    "map": Kind.SEGMENT_MAP,
    "unmap": Kind.SEGMENT_UNMAP,
    "oom": Kind.OOM,
}
GROWS: dict[int, int] = {
    Kind.SEGMENT_ALLOC: 1,
    Kind.SEGMENT_MAP: 1,
    Kind.SEGMENT_FREE: -1,
    Kind.SEGMENT_UNMAP: -1,
}
OF_EVENTS = ("kind", "device", "address", "bytes", "stack", "stream", "pool", "rounded", "reserved")
OF_START = ("device", "address", "stack", "stream", "pool", "rounded", "pending")


def allocator_trace(*lines: str, **fields: Any) -> MemoryTrace:
    """A trace from lines: `held|live|EVENT ADDRESS BYTES [key=value…]`; an oom's address is what was free."""
    written = [_read(line) for line in lines]
    held = [row for word, row in written if word == "held"]
    live = [row for word, row in written if word == "live"]
    happened = [{**row, "kind": KINDS[word]} for word, row in written if word in KINDS]
    count = 1 + max((row["device"] for _, row in written), default=0)
    reserved = [sum(row["bytes"] for row in held if row["device"] == device) for device in range(count)]
    devices = tuple(Device(f"cuda:{row}", reserved_at_start=size) for row, size in enumerate(reserved))
    for row in happened:
        reserved[row["device"]] += GROWS.get(row["kind"], 0) * row["bytes"]
        row["reserved"] = reserved[row["device"]]
    ooms = [
        OutOfMemory(place, row["bytes"], row["address"] or None)
        for place, row in enumerate(happened)
        if row["kind"] == Kind.OOM
    ]
    time = EPOCH + MICROSECOND * np.arange(len(happened))
    made = {
        "source": "test",
        "events": events(time, **_columns(happened, OF_EVENTS)),
        "start": start_state([row["bytes"] for row in live], **_columns(live, OF_START)),
        "devices": devices,
        "steps": (Step(0, EPOCH, EPOCH + MICROSECOND * max(len(happened), 1)),),
        "modules": (Module(NOT_NAMED),),
        "segments": _segments(held),
        "streams": STREAMS,
        "pools": POOLS,
        "ooms": tuple(ooms),
    }
    return MemoryTrace(**{**made, **fields})


def steps_of(*each: str, count: int, before: tuple[str, ...] = ()) -> MemoryTrace:
    """A trace of so many equal steps, in the lines of `tests.traces`; `#` in a line is the step's number."""
    lines = [line.replace("#", str(step)) for step in range(count) for line in (f"step {step}", *each)]
    return trace(*before, *lines)


def _segments(held: list[dict[str, int]]) -> Segments:
    empty = Segments()
    columns = _columns(held, tuple(Segments.__slots__))
    return Segments(**{name: np.array(rows, getattr(empty, name).dtype) for name, rows in columns.items()})


def _read(line: str) -> tuple[str, dict[str, int]]:
    word, address, size, *options = line.split()
    row = {"stream": 0, "pool": 0, "rounded": -1, "stack": -1, "device": 0, "expandable": 0, "pending": 0}
    row |= {key: int(value) for key, value in (option.split("=") for option in options)}
    return word, {**row, "address": _number(address), "bytes": _number(size)}


def _number(text: str) -> int:
    unit = {"K": K, "M": M}.get(text[-1], 1)
    return int(text.rstrip("KM")) * unit


def _columns(rows: list[dict[str, int]], names: tuple[str, ...]) -> dict[str, list[int]]:
    return {name: [row[name] for row in rows] for name in names}
