"""Every line's bytes at the peak are those of a second way to find them, which shares no code with ours."""

from __future__ import annotations

import gc

import pytest
import torch

from tb_memplugin import LineTracer
from tests.line_oracle import LineOracle
from tests.record.agreement import UNTUNED
from tests.record.tracer.truth import train_step
from tests.training import MODELS

ALL = {**MODELS, **UNTUNED}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def trained_within(name, block) -> None:
    torch.manual_seed(0)
    model = ALL[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train_step(model, optimizer)
    optimizer.zero_grad()
    gc.collect()
    with block:
        for _ in range(2):
            train_step(model, optimizer)


@pytest.mark.parametrize("name", ["transformer", "gru", "experts", "unet"])
def test_each_line_of_the_peak_is_the_oracles_to_the_byte(name):
    oracle, tracer = LineOracle(), LineTracer()
    trained_within(name, oracle)
    trained_within(name, tracer)
    found = {use.location: use.bytes for use in tracer.report().lines if use.location != "untraced"}
    assert found == oracle.at_peak
    assert sum(found.values()) == oracle.peak > 200_000
