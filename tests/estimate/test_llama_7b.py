"""Tests with Llama-7B in bf16, batch 1, sequence 2048, AdamW: more memory than a test machine has."""

from __future__ import annotations

import pytest
import torch

from tb_memplugin import MemoryEstimator

transformers = pytest.importorskip("transformers")

GIB = 1 << 30
PARAMETERS = 6_738_415_616


@pytest.fixture(scope="module")
def estimator() -> MemoryEstimator:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with MemoryEstimator(gpu="a100") as estimator, torch.device("cuda"):
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(use_cache=False))
            optimizer = torch.optim.AdamW(model.parameters())
            ids = estimator.create_fake_tensor(1, 2048, dtype=torch.long)
            for _ in range(2):
                model(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                estimator.step()
    finally:
        torch.set_default_dtype(default)
    return estimator


def test_the_peak_is_five_times_the_parameters(estimator: MemoryEstimator) -> None:
    """Parameters, gradients, two moments, and the square roots of foreach kernels take 62.756 GiB."""
    answer = estimator.estimate()
    without_workspaces = answer.peak_allocated_bytes - answer.workspace_bytes
    assert without_workspaces / GIB == pytest.approx(62.756, rel=0.005)
    assert 0 <= without_workspaces - 5 * 2 * PARAMETERS < 16 << 20


def test_every_part_is_exact(estimator: MemoryEstimator) -> None:
    parts = dict(estimator.estimate().breakdown)
    assert parts["parameter"] == 2 * PARAMETERS
    assert parts["gradient"] == 2 * PARAMETERS
    assert parts["optimizer_state"] == 2 * 2 * PARAMETERS
    assert parts["temporary"] == 2 * PARAMETERS
    assert sum(parts.values()) == estimator.estimate().peak_allocated_bytes


def test_it_fits_an_a100_of_80_gb(estimator: MemoryEstimator) -> None:
    assert estimator.estimate().fits


def test_layers_are_told_apart(estimator: MemoryEstimator) -> None:
    found = {one.name: one for one in estimator.get_module_stats()}
    layers = [found[f"model.layers.{row}"].at_peak_bytes for row in range(32)]
    assert len(set(layers)) == 1
    assert layers[0] == 4 * 2 * (4 * 4096 * 4096 + 3 * 4096 * 11008 + 2 * 4096)
