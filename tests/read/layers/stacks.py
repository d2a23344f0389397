"""Snapshots in memory whose allocations have the stacks that a test writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tb_memplugin.read.layers.inferred import with_inferred_layers
from tb_memplugin.read.snapshot.trace import trace_from_snapshot
from tb_memplugin.trace import MemoryTrace

Frame = tuple[str, str, int]
CALL: Frame = ("_call_impl", "site-packages/torch/nn/modules/module.py", 1779)
APPLY: Frame = ("_apply", "site-packages/torch/nn/modules/module.py", 930)
MAIN: Frame = ("<module>", "train.py", 3)
LINEAR: Frame = ("forward", "site-packages/torch/nn/modules/linear.py", 134)


def native(name: str) -> Frame:
    return (name, "??", 0)


def snapshot_of(
    *allocations: tuple[int, Sequence[Frame]] | tuple[int, Sequence[Frame], str],
) -> dict[str, Any]:
    """Return a snapshot that allocates bytes with stacks (outermost frame first), and frees nothing."""
    entries: list[dict[str, Any]] = []
    blocks: list[dict[str, Any]] = []
    address = 1 << 20
    for size, stack, *label in allocations:
        frames = [{"name": name, "filename": file, "line": line} for name, file, line in reversed(stack)]
        entry = {"action": "alloc", "addr": address, "size": size, "stream": 0, "time_us": len(entries) + 1}
        entries.append({**entry, "frames": frames, "user_metadata": label[0] if label else ""})
        blocks.append(
            {
                "address": address,
                "size": size,
                "requested_size": size,
                "state": "active_allocated",
                "frames": [],
            }
        )
        address += size
    total = sum(size for size, *_ in allocations)
    sizes = {"total_size": total, "allocated_size": total, "active_size": total, "requested_size": total}
    segment = {
        "device": 0,
        "address": 1 << 20,
        "stream": 0,
        "segment_type": "large",
        "blocks": blocks,
        **sizes,
    }
    return {"segments": [segment], "device_traces": [entries]}


def inferred(*allocations: tuple[int, Sequence[Frame]] | tuple[int, Sequence[Frame], str]) -> MemoryTrace:
    return with_inferred_layers(trace_from_snapshot(snapshot_of(*allocations), "test"))


def modules(trace: MemoryTrace) -> list[str]:
    """The module of each allocation."""
    return [trace.modules[row].key for row in trace.events.module.tolist()]
