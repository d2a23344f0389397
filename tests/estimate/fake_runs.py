"""Allocations of a few lines on fake tensors, with and without our corrections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tb_memplugin import MemoryEstimator
from tb_memplugin.trace import Category

KIB, MIB = 1 << 10, 1 << 20


def estimated(program: Callable[[], Any], **options: Any) -> MemoryEstimator:
    """Run a program on fake tensors; what it returns lives to the end."""
    with MemoryEstimator(**options) as estimator:
        kept = program()
    del kept
    return estimator


def peak(program: Callable[[], Any], **options: Any) -> int:
    return estimated(program, **options).get_max_memory_allocated()[0]


def allocations(estimator: MemoryEstimator) -> list[tuple[str, int, str]]:
    """(operator without `aten::`, bytes, category) of each, in order."""
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
    """Bytes of each allocation of an operator."""
    return [size for name, size, _ in allocations(estimator) if name == operator]
