"""Helpers that run a few lines on fake tensors, with or without corrections, and return their allocations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tb_memplugin import MemoryEstimator
from tb_memplugin.trace import Category

KIB, MIB = 1 << 10, 1 << 20


def estimated(program: Callable[[], Any], **options: Any) -> MemoryEstimator:
    """Run a program on fake tensors; its result stays alive to the end."""
    with MemoryEstimator(**options) as estimator:
        kept = program()
    del kept
    return estimator


def peak(program: Callable[[], Any], **options: Any) -> int:
    return estimated(program, **options).get_max_memory_allocated()[0]


def allocations(estimator: MemoryEstimator) -> list[tuple[str, int, str]]:
    """Return (operator without `aten::`, bytes, category) of each allocation, in order."""
    trace = estimator.trace_result()
    blocks = trace.allocations
    return [
        (
            trace.operators[blocks.operator[row]].removeprefix("aten::"),
            int(blocks.bytes[row]),
            Category(int(blocks.category[row])).key,
        )
        for row in range(len(blocks))
    ]


def sizes(estimator: MemoryEstimator, operator: str) -> list[int]:
    """Return the bytes of each allocation of an operator."""
    return [size for name, size, _ in allocations(estimator) if name == operator]
