"""The rule `outsized_tensor` on small histories."""

from __future__ import annotations

import pytest

from tb_memplugin.trace import MemoryTrace
from tests.analysis.advice_rules.findings import found, stacked, why
from tests.traces import trace


def pairs(*, size: int = 4000, tensors: int = 1, smaller: int = 20) -> MemoryTrace:
    """Layers of 10 each, and a few tensors of all pairs of their rows, in forward and once in backward."""
    lines = [f"alloc 10 a{number} phase=forward" for number in range(smaller)]
    lines += [f"alloc {size} p{number} phase=forward" for number in range(tensors)]
    lines.append(f"alloc {size} g phase=backward operator=aten::pow_backward")
    stacks = [("forward net.py:3",)] * smaller + [("pairs net.py:9",)] * tensors + [("(backward of Pow)",)]
    return stacked(trace(*lines), *stacks)


def test_a_tensor_of_all_pairs_is_many_times_as_large_as_all_others() -> None:
    """20 x 10, and 4,000 in forward and in backward."""
    finding = found(pairs(), "outsized_tensor")
    assert (finding.bytes, finding.of_bytes, finding.subject) == (8000, 8200, "net.py:9 (pairs)")
    assert "400 times as large as all others" in finding.title


@pytest.mark.parametrize(
    "history", [pairs(size=159), pairs(tensors=5), pairs(smaller=3)], ids=["small", "many", "usual"]
)
def test_other_large_tensors_are_as_they_should_be(history: MemoryTrace) -> None:
    assert "No few tensors" in why(history, "outsized_tensor")


def test_scalars_make_no_tensor_outsized() -> None:
    """One large tensor among four; 20 values of a log do not count."""
    sizes = [4] * 20 + [10, 10, 10, 4000]
    history = trace(*(f"alloc {size} a{at} phase=forward" for at, size in enumerate(sizes)))
    assert "No few tensors" in why(stacked(history, *[("forward net.py:3",)] * 24), "outsized_tensor")
