"""LSTM, GRU and RNN as cuDNN computes them: PyTorch has no fake implementation of `_cudnn_rnn`.

Sizes of results and gradients are exact. The reserve space, which cuDNN keeps from forward to backward, is
modelled, since its size is not documented. Workspaces are not known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tb_memplugin.estimate.corrections.correction import Correction
from tb_memplugin.estimate.corrections.packed_sequences import values_of
from tb_memplugin.estimate.fake_mode import CountingFakeMode, Rule
from tb_memplugin.estimate.patches import Patches

aten = torch.ops.aten
MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}
"""Values of cudnnRNNMode_t as `_cudnn_rnn` numbers them."""

LSTM = 2
KEPT = {0: 2, 1: 2, 2: 6, 3: 5}
"""Number of vectors of the hidden size in the modelled reserve space, by mode.

It is for each layer, direction, time step and sequence: the gates, the cell state, and the result.
"""

_NOTE = (
    "LSTM, GRU and RNN: what cuDNN keeps for backward (its reserve space) is modelled; its workspaces "
    "are not counted."
)


class Recurrent(Correction):
    """Sends recurrent layers to cuDNN's operators, and adds fake implementations for these."""

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Register the layers for CUDA tensors, and flatten weights as cuDNN requires."""
        library = torch.library.Library("aten", "IMPL")
        patches.on_undo(library._destroy)
        for name, kind in MODES.items():
            library.impl(f"{name}.input", _through_cudnn(kind), "AutogradCUDA")
            library.impl(f"{name}.data", _packed_through_cudnn(kind), "AutogradCUDA")
        original = nn.RNNBase.flatten_parameters
        patches.set(
            nn.RNNBase,
            "flatten_parameters",
            lambda layer: _flatten(layer) if _on_cuda(layer) else original(layer),
        )

    def rules(self) -> dict[Any, Rule]:
        """Return rules for cuDNN's operators."""
        return {
            aten._cudnn_rnn.default: self._forward,
            aten._cudnn_rnn_backward.default: _backward,
            aten._thnn_fused_gru_cell.default: _gru_cell,
            aten._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
        }

    def _forward(self, mode: CountingFakeMode, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        self.target.note(_NOTE)
        data, weights, _, _, hx, cx, kind, hidden, projected, layers, _, _, train, both, *_ = args
        directions = 2 if both else 1
        rows, result = data.shape[:-1].numel(), projected or hidden  # packed data has one dimension of rows
        with mode:
            shape = (*data.shape[:-1], result * directions)
            kept = layers * directions * rows * hidden * KEPT[kind] * data.element_size() if train else 0
            flat = len({weight.untyped_storage()._cdata for weight in weights}) == 1
            total = sum(weight.numel() for weight in weights)
            return (
                data.new_empty(shape),
                torch.empty_like(hx),
                torch.empty_like(cx) if cx is not None else data.new_empty(0),
                data.new_empty(kept, dtype=torch.uint8),
                data.new_empty(0 if flat else total),
            )


def _through_cudnn(kind: int) -> Any:
    """Return the function for padded batches; its arguments are those of `torch.lstm`."""

    def run(data: torch.Tensor, hx: Any, params: Any, *settings: Any) -> Any:
        return _cudnn(kind, data, hx, params, [], *settings)

    return run


def _packed_through_cudnn(kind: int) -> Any:
    """Return the function for packed sequences."""

    def run(data: torch.Tensor, batch_sizes: torch.Tensor, hx: Any, params: Any, *settings: Any) -> Any:
        return _cudnn(kind, data, hx, params, values_of(batch_sizes), *settings)

    return run


def _cudnn(
    kind: int,
    data: torch.Tensor,
    hx: Any,
    params: Sequence[torch.Tensor],
    batch_sizes: list[int],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool = False,
) -> Any:
    states = list(hx) if kind == LSTM else [hx, None]
    hidden, result = states[-1 if kind == LSTM else 0].shape[-1], states[0].shape[-1]
    stride = len(params) // (num_layers * (2 if bidirectional else 1))
    data, params, *states = _autocast(data, params, *states)
    sizes = [hidden, result if result != hidden else 0, num_layers, batch_first]
    with torch.autocast("cuda", enabled=False):  # done above; in a CUDA build it would run kernels
        out = aten._cudnn_rnn(
            *(data, params, stride, None, *states, kind, *sizes),
            *(dropout, train, bidirectional, batch_sizes, None),
        )
    return out[: 3 if kind == LSTM else 2]


def _autocast(
    data: torch.Tensor, params: Sequence[torch.Tensor], *states: torch.Tensor | None
) -> tuple[Any, ...]:
    """Cast input, weights (into one buffer) and states to autocast's dtype.

    Source: cast_reflatten in cudnn/RNN.cpp.
    """
    if not torch.is_autocast_enabled("cuda"):
        return data, params, *states
    dtype = torch.get_autocast_dtype("cuda")
    flat = torch.cat([one.to(dtype).reshape(-1) for one in params])
    cast = [one.to(dtype) if one is not None else None for one in states]
    return data.to(dtype), _pieces(flat, params), *cast


def _backward(mode: CountingFakeMode, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    data, weights, hx, cx, wanted = args[0], args[1], args[4], args[5], args[-1]
    with mode:
        total = data.new_empty(sum(weight.numel() for weight in weights)) if wanted[3] else None
        return (
            torch.empty_like(data) if wanted[0] else None,
            torch.empty_like(hx) if wanted[1] else None,
            torch.empty_like(cx) if cx is not None and wanted[2] else None,
            _pieces(total, weights) if total is not None else [None] * len(weights),
        )


def _pieces(flat: torch.Tensor, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of one buffer, one for each weight."""
    pieces, start = [], 0
    for weight in weights:
        pieces.append(flat[start : start + weight.numel()].view(weight.shape))
        start += weight.numel()
    return pieces


def _on_cuda(layer: nn.RNNBase) -> bool:
    weights = layer._flat_weights
    return all(isinstance(weight, torch.Tensor) and weight.is_cuda for weight in weights)


def _flatten(layer: nn.RNNBase) -> None:
    """Move all weights of a layer into one buffer, unless they are in one already."""
    weights: Any = layer._flat_weights
    storages = {weight.untyped_storage()._cdata for weight in weights}
    if len({id(weight) for weight in weights}) != len(weights) or len(storages) == 1:
        return
    with torch.no_grad():
        flat = weights[0].new_empty(sum(weight.numel() for weight in weights))
        for weight, piece in zip(weights, _pieces(flat, weights), strict=True):
            weight.data = piece


def _gru_cell(mode: CountingFakeMode, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return the new state, and what backward reads: five vectors for each sequence (RNN.cu)."""
    with mode:
        hx = args[2]
        kept = hx.new_empty(hx.shape[0], 5 * hx.shape[1])
        return torch.empty_like(hx, memory_format=torch.contiguous_format), kept


def _gru_cell_backward(mode: CountingFakeMode, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return the gradients of both products, the state and both biases."""
    gradient, _, has_biases = args
    with mode:
        rows, hidden = gradient.shape
        gates = [gradient.new_empty(rows, 3 * hidden) for _ in range(2)]
        biases = [gradient.new_empty(3 * hidden) if has_biases else None for _ in range(2)]
        return *gates, torch.empty_like(gradient, memory_format=torch.contiguous_format), *biases
