"""Tests that parameters, gradients and optimizer state have exactly the sizes that can be calculated."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tb_memplugin import MemoryEstimator
from tb_memplugin.trace import Category, MemoryTrace
from tests.estimate.small_models import MODELS


def highest(trace: MemoryTrace, category: Category, labelled: str = "") -> int:
    """Return the most bytes of a category live at once, of blocks whose label ends with `labelled`."""
    blocks = trace.allocations
    rows = [
        row
        for row in np.flatnonzero(blocks.category == category).tolist()
        if blocks.label[row] >= 0 and trace.labels[blocks.label[row]].endswith(labelled)
    ]
    delta = np.zeros(len(trace.events) + 1, np.int64)
    for row in rows:
        delta[blocks.born[row]] += blocks.bytes[row]
        delta[blocks.freed[row]] -= blocks.bytes[row]
    return int(np.cumsum(delta[:-1]).max(initial=0))


@pytest.mark.parametrize("name", MODELS)
def test_parameters_gradients_and_optimizer_state_are_exact(name: str) -> None:
    if name != "LSTM":
        pytest.importorskip("transformers")
    with MemoryEstimator() as estimator, torch.device("cuda"):
        model, loss, _ = MODELS[name]()
        optimizer = torch.optim.AdamW(model.parameters())
        estimator.watch(model, optimizer)
        used = 0
        for _ in range(2):
            loss().backward()
            used = sum(one.numel() * 4 for one in model.parameters() if one.grad is not None)
            optimizer.step()
            optimizer.zero_grad()
            estimator.step()
        parameters = sum(one.numel() * 4 for one in model.parameters())
    trace = estimator.trace_result()
    assert highest(trace, Category.PARAMETER) == parameters
    assert highest(trace, Category.GRADIENT, "(gradient)") == used
    assert highest(trace, Category.OPTIMIZER_STATE, "exp_avg)") == used
    assert highest(trace, Category.OPTIMIZER_STATE, "exp_avg_sq)") == used
    assert (
        sum(size for _, size in estimator.estimate().breakdown) == estimator.estimate().peak_allocated_bytes
    )
