"""On CUDA the lines' sum is the allocator's own peak. Needs an NVIDIA GPU."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F

from tb_memplugin import LineTracer
from tests.training import MODELS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="no CUDA device, or not run with -m gpu: make gpu"
    ),
]


@pytest.mark.parametrize("name", ["cnn", "transformer", "checkpointed"])
def test_the_lines_sum_to_the_allocators_peak(name):
    torch.manual_seed(0)
    model = MODELS[name]().cuda()
    x, y = (tensor.cuda() for tensor in model.batch())
    tracer = LineTracer()
    torch.cuda.reset_peak_memory_stats()
    with tracer:
        F.cross_entropy(model(x), y).backward()
        torch.cuda.synchronize()
        peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    report = tracer.report()
    assert report.device == "cuda:0"
    assert report.max_bytes == report.lines[-1].cumulative_bytes == peak
    assert report.untraced_bytes > 0
    assert any(use.file.endswith("training.py") for use in report.lines)


def test_a_line_has_the_bytes_that_it_allocated_and_a_free_does_not_hide_it():
    torch.ones(1, device="cuda")
    tracer = LineTracer()
    with tracer:
        large = torch.zeros(1_000_000, device="cuda")
        del large
        small = torch.zeros(10, device="cuda")
    (use,) = [use for use in tracer.report().lines if use.file == __file__]
    assert (use.bytes, use.count, use.median_bytes) == (4_000_000, 1, 4_000_000.0)
    del small


def test_threads_allocate_at_their_own_lines():
    torch.ones(1, device="cuda")
    kept = []
    works = [lambda: torch.zeros(10_000, device="cuda"), lambda: torch.zeros(20_000, device="cuda")]
    tracer = LineTracer()
    with tracer:
        threads = [threading.Thread(target=lambda work=work: kept.append(work())) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert {use.bytes for use in tracer.report().lines if use.function == "<lambda>"} >= {120_000}
    assert tracer.report().threads == ()
