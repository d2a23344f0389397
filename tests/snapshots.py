"""Tiny memory snapshots: segments of blocks, and entries a line each."""

from __future__ import annotations

from pathlib import Path
from typing import Any, BinaryIO

from tb_memplugin.read.snapshot.safe_pickle import read_pickle
from tb_memplugin.read.snapshot.trace import trace_from_snapshot
from tb_memplugin.trace import MemoryTrace


def block(address: int, requested: int, state: str = "active_allocated", size: int = 512) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": []}


def segment(*blocks: dict[str, Any], total: int = 2048, device: int = 0) -> dict[str, Any]:
    address = blocks[0].get("address", 1000) if blocks else 1000
    return {"device": device, "address": address, "total_size": total, "stream": 0, "blocks": list(blocks)}


def entries(*lines: str) -> list[dict[str, Any]]:
    """`action address size [time in µs]` an entry, 10 µs apart unless told."""
    made: list[dict[str, Any]] = []
    for row, (action, addr, size, *time) in enumerate(line.split() for line in lines):
        at = {"device_free": int(addr)} if action == "oom" else {"addr": int(addr)}
        made.append(
            {
                "action": action,
                **at,
                "size": int(size),
                "stream": 0,
                "frames": [],
                "time_us": int(time[0]) if time else 10 * row,
            }
        )
    return made


def snapshot(segments: list[dict[str, Any]], *traces: list[dict[str, Any]]) -> dict[str, Any]:
    return {"segments": segments, "device_traces": list(traces)}


def load_plain(source: BinaryIO | bytes, where: str) -> object:
    """The object in a pickle of plain data."""
    return read_pickle(source, where)[0]


def load_snapshot(path: str | Path) -> MemoryTrace:
    """The trace in a snapshot's pickle, read as a small file is."""
    return trace_from_snapshot(load_plain(Path(path).read_bytes(), str(path)), str(path), "cuda")
