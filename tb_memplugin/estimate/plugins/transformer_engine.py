"""transformer-engine: run its layers in plain PyTorch, since its CUDA kernels do not support fake tensors.

The memory counted is that of unfused layers of the same shapes, in the dtype of their parameters. fp8 copies
and the library's own workspaces are not counted. The plugin was tested with a stand-in that has the same
import paths and signatures, not with the library itself, which needs a CUDA compiler.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.nn import functional

from tb_memplugin.estimate.plugins.plugin import replaced

_MODULE = "transformer_engine.pytorch"


class TransformerEngine:
    """The plugin for transformer_engine.

    It covers Linear, LayerNormLinear, LayerNormMLP, LayerNorm, RMSNorm and fp8_autocast.
    """

    name = "transformer-engine"

    def applies(self) -> bool:
        """Return whether transformer_engine.pytorch is imported."""
        return _MODULE in sys.modules

    @contextmanager
    def patch(self) -> Iterator[None]:
        """Replace the layers' forwards by operators that have fake implementations."""
        library: Any = importlib.import_module(_MODULE)
        changes: list[tuple[object, str, object]] = [
            (getattr(library, name), "forward", forward)
            for name, forward in _FORWARDS.items()
            if hasattr(library, name)
        ]
        if hasattr(library, "fp8_autocast"):
            changes.append((library, "fp8_autocast", lambda *_, **__: nullcontext()))
        with replaced(*changes):
            yield


def _linear(layer: Any, inp: torch.Tensor, *_: Any, **__: Any) -> Any:
    return _with_bias(layer, inp)


def _norm_linear(layer: Any, inp: torch.Tensor, *_: Any, **__: Any) -> Any:
    normalised = _normalise(layer, inp, layer.layer_norm_weight, getattr(layer, "layer_norm_bias", None))
    result = _with_bias(layer, normalised)
    if not getattr(layer, "return_layernorm_output", False):
        return result
    return (*result, normalised) if isinstance(result, tuple) else (result, normalised)


def _norm_mlp(layer: Any, inp: torch.Tensor, *_: Any, **__: Any) -> Any:
    normalised = _normalise(layer, inp, layer.layer_norm_weight, getattr(layer, "layer_norm_bias", None))
    hidden = functional.linear(normalised, layer.fc1_weight, _bias(layer.fc1_bias))
    active = _activate(hidden, getattr(layer, "activation", "gelu"))
    return functional.linear(active, layer.fc2_weight, _bias(layer.fc2_bias))


def _layer_norm(layer: Any, inp: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return functional.layer_norm(inp, layer.weight.shape, layer.weight, layer.bias, layer.eps)


def _rms_norm(layer: Any, inp: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return functional.rms_norm(inp, layer.weight.shape, layer.weight, layer.eps)


def _with_bias(layer: Any, inp: torch.Tensor) -> Any:
    bias = _bias(getattr(layer, "bias", None))
    if getattr(layer, "return_bias", False):
        return functional.linear(inp, layer.weight), bias
    return functional.linear(inp, layer.weight, bias)


def _normalise(layer: Any, inp: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
    if getattr(layer, "normalization", "LayerNorm") == "RMSNorm":
        return functional.rms_norm(inp, weight.shape, weight, layer.eps)
    return functional.layer_norm(inp, weight.shape, weight, _bias(bias), layer.eps)


def _activate(hidden: torch.Tensor, kind: str) -> torch.Tensor:
    """Apply an activation function by name; gated ones halve the last dimension."""
    gates: dict[str, Any] = {"geglu": functional.gelu, "swiglu": functional.silu, "reglu": functional.relu}
    if kind in gates:
        gate, value = hidden.chunk(2, dim=-1)
        gated: torch.Tensor = gates[kind](gate) * value
        return gated
    plain: dict[str, Any] = {"relu": functional.relu, "silu": functional.silu}
    result: torch.Tensor = plain.get(kind, functional.gelu)(hidden)
    return result


def _bias(bias: torch.Tensor | None) -> torch.Tensor | None:
    """Return the bias, None for the empty tensor that the library keeps if there is no bias."""
    return bias if bias is not None and bias.numel() else None


_FORWARDS = {
    "Linear": _linear,
    "LayerNormLinear": _norm_linear,
    "LayerNormMLP": _norm_mlp,
    "LayerNorm": _layer_norm,
    "RMSNorm": _rms_norm,
}
