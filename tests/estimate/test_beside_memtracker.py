"""Tests that estimates without corrections equal those of torch's MemTracker, on ten architectures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from tb_memplugin import MemoryEstimator
from tb_memplugin.estimate.run import cuda_shim
from tests.estimate.small_models import MODELS


@pytest.fixture
def cuda_known() -> Iterator[None]:
    cuda_shim.switch(True)
    yield
    cuda_shim.switch(False)


def tracked(name: str) -> int:
    """Return MemTracker's peak of one training step, in bytes."""
    with FakeTensorMode(), torch.device("cuda"), torch.autograd.set_multithreading_enabled(False):
        model, loss, inputs = MODELS[name]()
        optimizer = torch.optim.AdamW(model.parameters())
        tracker = MemTracker()
        tracker.track_external(model, optimizer, *inputs)
        with tracker:
            loss().backward()
            optimizer.step()
            optimizer.zero_grad()
    peak = tracker.get_tracker_snapshot("peak")
    return int(peak[torch.device("cuda:0")]["Total"])


def estimated(name: str) -> int:
    """Return the estimated peak of the same step without corrections, in bytes."""
    with MemoryEstimator(corrected=False) as estimator, torch.device("cuda"):
        model, loss, _ = MODELS[name]()
        optimizer = torch.optim.AdamW(model.parameters())
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
    return estimator.get_max_memory_allocated()[0]


@pytest.mark.usefixtures("cuda_known")
@pytest.mark.parametrize("name", MODELS)
def test_the_peak_is_memtrackers_before_our_corrections(name: str) -> None:
    if name != "LSTM":
        pytest.importorskip("transformers")
    assert estimated(name) == tracked(name)
