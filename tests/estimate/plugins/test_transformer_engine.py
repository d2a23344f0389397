"""Tests for the Transformer Engine plugin with a stand-in: its paths and signatures, without kernels."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from tb_memplugin import MemoryEstimator
from tests.estimate.fake_runs import sizes

KIB = 1 << 10


def kernel(*_: Any, **__: Any) -> torch.Tensor:
    raise RuntimeError("a CUDA kernel, which knows no fake tensors")


class Linear(nn.Module):
    def __init__(self, in_features: int, out_features: int, bias: bool = True, **options: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else torch.empty(0)
        self.return_bias = options.get("return_bias", False)

    forward = kernel


class LayerNormLinear(Linear):
    def __init__(self, in_features: int, out_features: int, eps: float = 1e-5, **options: Any) -> None:
        super().__init__(in_features, out_features, **options)
        self.layer_norm_weight = nn.Parameter(torch.empty(in_features))
        self.layer_norm_bias = nn.Parameter(torch.empty(in_features))
        self.eps, self.normalization = eps, options.get("normalization", "LayerNorm")
        self.return_layernorm_output = options.get("return_layernorm_output", False)

    forward = kernel


class LayerNormMLP(nn.Module):
    def __init__(self, hidden_size: int, ffn_hidden_size: int, activation: str = "gelu") -> None:
        super().__init__()
        wide = 2 * ffn_hidden_size if activation.endswith("glu") else ffn_hidden_size
        self.layer_norm_weight = nn.Parameter(torch.empty(hidden_size))
        self.layer_norm_bias = nn.Parameter(torch.empty(hidden_size))
        self.fc1_weight, self.fc1_bias = nn.Parameter(torch.empty(wide, hidden_size)), torch.empty(0)
        self.fc2_weight = nn.Parameter(torch.empty(hidden_size, ffn_hidden_size))
        self.fc2_bias, self.eps, self.activation = torch.empty(0), 1e-5, activation

    forward = kernel


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    package, made = ModuleType("transformer_engine"), ModuleType("transformer_engine.pytorch")
    for layer in (Linear, LayerNormLinear, LayerNormMLP):
        setattr(made, layer.__name__, layer)
    made.fp8_autocast = kernel  # type: ignore[attr-defined]
    package.pytorch = made  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", made)
    return made


def test_layers_run_and_are_their_own_again(library: ModuleType) -> None:
    """A batch of 128 rows of 64 floats has 32 KiB, and so has each layer's result."""
    with MemoryEstimator(device="cpu") as estimator, library.fp8_autocast(enabled=True):
        model = nn.Sequential(LayerNormLinear(64, 64), Linear(64, 64, bias=False))
        model(estimator.create_fake_tensor(128, 64)).sum().backward()
    assert sizes(estimator, "addmm") == [32 * KIB]
    assert 32 * KIB in sizes(estimator, "mm")
    assert Linear.forward is kernel
    assert library.fp8_autocast is kernel


def test_layers_return_what_their_options_say() -> None:
    with MemoryEstimator(device="cpu") as estimator:
        batch = estimator.create_fake_tensor(8, 64)
        result, bias = Linear(64, 32, return_bias=True)(batch)
        assert (result.shape, bias.shape) == ((8, 32), (32,))
        result, normalised = LayerNormLinear(64, 32, return_layernorm_output=True)(batch)
        assert (result.shape, normalised.shape) == ((8, 32), (8, 64))


@pytest.mark.parametrize("activation", ["gelu", "swiglu", "geglu", "relu"])
def test_gated_layers_halve_what_they_widened(activation: str) -> None:
    with MemoryEstimator(device="cpu") as estimator:
        assert LayerNormMLP(64, 256, activation)(estimator.create_fake_tensor(8, 64)).shape == (8, 64)
