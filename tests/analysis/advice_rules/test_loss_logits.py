"""The rule `loss_logits` on small histories."""

from __future__ import annotations

from tests.analysis.advice_rules.findings import found
from tests.traces import trace


def test_a_loss_in_float32_keeps_copies_of_the_logits() -> None:
    """Of bf16 logits of 200: the cast, the log-softmax and its gradient, of 400 each; the logits stay."""
    history = trace(
        "start 100 w",
        "alloc 200 logits operator=aten::linear",
        "alloc 400 cast operator=aten::to",
        "free logits",
        "alloc 400 loss operator=aten::log_softmax",
        "free cast",
        "alloc 400 gradient operator=LogSoftmaxBackward0 phase=backward",
    )
    finding = found(history, "loss_logits")
    # with them 100 + 800; without, the logits and the weights are the peak
    assert (finding.bytes, finding.of_bytes) == (900 - 300, 900)
    assert "casts the logits to float32" in finding.title


def test_a_cast_behind_a_log_softmax_is_one_more_copy_of_the_logits() -> None:
    """Of 200 in bf16: the cast for the loss, the log-softmax, and a cast for another term, of 400 each."""
    operators = ("linear", "to", "log_softmax", "to")
    sizes = (200, 400, 400, 400)
    lines = [f"alloc {size} x{at} operator=aten::{operators[at]}" for at, size in enumerate(sizes)]
    finding = found(trace(*lines), "loss_logits")
    assert (finding.bytes, finding.of_bytes) == (1200, 1400)
