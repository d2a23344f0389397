"""Tests for streams in an estimate: the allocator keeps their memory apart."""

from __future__ import annotations

import pytest
import torch

from tb_memplugin import MemoryEstimator
from tb_memplugin.read import cublas
from tb_memplugin.trace import Kind


def test_memory_of_two_streams_is_kept_apart() -> None:
    """30 MiB that another stream freed are not there for the default one."""
    with MemoryEstimator(gpu="a100") as estimator:
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.empty(30 << 20, dtype=torch.uint8, device="cuda")
        torch.empty(30 << 20, dtype=torch.uint8, device="cuda")
        assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert estimator.estimate().peak_reserved_bytes == 60 << 20
    trace = estimator.trace_result()
    rows = trace.events.stream[trace.events.kind == Kind.ALLOC]
    assert [trace.streams[row] == 0 for row in rows] == [False, True]


def test_one_stream_is_not_named() -> None:
    with MemoryEstimator(gpu="a100") as estimator:
        torch.empty(1024, device="cuda")
    assert set(estimator.trace_result().events.stream.tolist()) <= {-1, 0}


def test_each_stream_that_multiplies_has_a_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cublas, "_torch_version", lambda: (2, 13))
    with MemoryEstimator(gpu="a100") as estimator:
        matrix = torch.empty(64, 64, device="cuda")
        with torch.cuda.stream(torch.cuda.Stream()):
            matrix @ matrix
        matrix @ matrix
    assert estimator.estimate().workspace_bytes == 2 * 8_519_680
