"""Advice: a reserve far above what is ever in use."""

from __future__ import annotations

import numpy as np

from tb_memplugin.analysis.allocator import knows_segments, levels, pools
from tb_memplugin.analysis.findings import Evidence, Finding, Fine, NotJudged, Result, Where, in_words, share
from tb_memplugin.trace import MemoryTrace

LEAST_SHARE = 0.2
"""Of the reserve that is never in use."""

LEAST_BYTES = 64 << 20
"""A few segments of 20 MiB that are not full are how a caching allocator works."""

SHOWN_POOLS = 4


def unused_reserve(trace: MemoryTrace, device: int) -> Result:
    """The highest reserve against the most that was ever in use (what waits for its free counts as used).

    Its bytes are the difference: they lay idle all the time.
    """
    name = trace.devices[device].name
    if not trace.devices[device].has_reserved:
        return Fine(f"The allocator of {name} keeps no reserve.")
    now = levels(trace, device)
    if now.reserved is None:
        return NotJudged(f"The recording tells no reserve of {name}.")
    most_used, most_reserved = int(now.active.max()), int(now.reserved.max())
    idle = most_reserved - most_used
    if idle < LEAST_BYTES or idle < LEAST_SHARE * most_reserved:
        return Fine(
            f"{in_words(most_reserved)} were reserved at most, and {in_words(most_used)} in use at most."
        )
    at = int(np.argmax(now.active)) - 1
    where = Where("allocator", (("step", str(trace.step_at(at).number)), ("event", str(at))))
    return Finding(
        kind="unused_reserve",
        level="problem",
        device=name,
        step=trace.step_at(at).number,
        title=f"{name} keeps a reserve far above what is ever in use in this recording.",
        subject=name,
        bytes=idle,
        measure="reserved, never in use",
        of_bytes=most_reserved,
        evidence=(
            Evidence("most reserved", most_reserved, "", False),
            Evidence("most in use", most_used, "what waits for its free included", False),
            *_of_pools(trace, device, at),
        ),
        where=where,
        what_to_do=_what_to_do(trace),
    )


def _of_pools(trace: MemoryTrace, device: int, event: int) -> list[Evidence]:
    """Where the reserve lies at a moment, as far as the trace tells."""
    if not knows_segments(trace, device):
        return []
    found = []
    for pool in pools(trace, device, event)[:SHOWN_POOLS]:
        reserved, free = pool.reserved_bytes or 0, pool.free_bytes or 0
        detail = f"free of {in_words(reserved)} then; in one piece {in_words(pool.largest_free_bytes or 0)}"
        found.append(
            Evidence(f"pool {pool.pool}, {pool.stream}", free, f"{detail} ({share(free, reserved)})", False)
        )
    return [row for row in found if row.bytes]


def _what_to_do(trace: MemoryTrace) -> str:
    told = {key: value.lower() for key, value in trace.properties.items()}
    if any(key.endswith("expandable_segments") and value == "true" for key, value in told.items()):
        return (
            "Something before this recording needed more, a first step or an evaluation: "
            "torch.cuda.empty_cache() after it gives the idle part back to other processes."
        )
    return (
        "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, which lets pieces of the reserve serve "
        "requests of any size; where a first step or an evaluation needed more, call "
        "torch.cuda.empty_cache() after it."
    )
