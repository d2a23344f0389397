"""Advice: far more memory is reserved than is ever in use."""

from __future__ import annotations

import numpy as np

from tb_memplugin.analysis.allocator import knows_segments, levels, pools
from tb_memplugin.analysis.block_origins import Judged
from tb_memplugin.analysis.findings import Evidence, Finding, Fine, NotJudged, Result, Where, share
from tb_memplugin.analysis.units import size_text
from tb_memplugin.trace import MemoryTrace

LEAST_SHARE = 0.2
"""Least share of the reserved memory that must never be in use for a finding."""

LEAST_BYTES = 64 << 20
"""Least bytes for a finding: a few partly used segments of 20 MiB are normal for a caching allocator."""

SHOWN_POOLS = 4


def unused_reserve(judged: Judged) -> Result:
    """Compare the most bytes ever reserved with the most ever in use (pending blocks count as used).

    The finding's bytes are the difference, which was never in use.
    """
    trace, device = judged.trace, judged.device
    name = judged.name
    if not trace.devices[device].has_reserved:
        return Fine(f"The allocator of {name} does not keep reserved memory.")
    memory = levels(trace, device)
    if memory.reserved is None:
        return NotJudged(f"The recording does not contain the reserved memory of {name}.")
    most_used, most_reserved = int(memory.active.max()), int(memory.reserved.max())
    idle = most_reserved - most_used
    if idle < LEAST_BYTES or idle < LEAST_SHARE * most_reserved:
        return Fine(
            f"At most {size_text(most_reserved)} were reserved, and at most {size_text(most_used)} were in "
            "use."
        )
    at = int(np.argmax(memory.active)) - 1
    where = Where("allocator", (("step", str(trace.step_at(at).number)), ("event", str(at))))
    return Finding(
        kind="unused_reserve",
        level="problem",
        device=name,
        step=trace.step_at(at).number,
        title=f"{name} keeps far more memory reserved than this recording ever uses.",
        subject=name,
        bytes=idle,
        measure="reserved, never in use",
        of_bytes=most_reserved,
        evidence=(
            Evidence("most reserved", most_reserved, "", False),
            Evidence("most in use", most_used, "including blocks that wait to be freed", False),
            *_of_pools(trace, device, at),
        ),
        where=where,
        what_to_do=_what_to_do(trace),
    )


def _of_pools(trace: MemoryTrace, device: int, event: int) -> list[Evidence]:
    """Return the free bytes of the largest pools after an event; empty if the segments are not known."""
    if not knows_segments(trace, device):
        return []
    rows = []
    for pool in pools(trace, device, event)[:SHOWN_POOLS]:
        reserved, free = pool.reserved_bytes or 0, pool.free_bytes or 0
        largest = size_text(pool.largest_free_bytes or 0)
        detail = f"free of {size_text(reserved)} reserved; largest free block {largest}"
        rows.append(
            Evidence(f"pool {pool.pool}, {pool.stream}", free, f"{detail} ({share(free, reserved)})", False)
        )
    return [row for row in rows if row.bytes]


def _what_to_do(trace: MemoryTrace) -> str:
    properties = {key: value.lower() for key, value in trace.properties.items()}
    if any(key.endswith("expandable_segments") and value == "true" for key, value in properties.items()):
        return (
            "Something before this recording needed more memory, such as a first step or an evaluation. "
            "Call torch.cuda.empty_cache() after it to return the idle part to the device."
        )
    return (
        "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, so that reserved memory can serve requests "
        "of any size. If a first step or an evaluation needed more memory, call torch.cuda.empty_cache() "
        "after it."
    )
