"""LSTM, GRU and RNN as cuDNN computes them: PyTorch has no fake implementation of `_cudnn_rnn`.

The order of allocations is that of aten/src/ATen/native/cudnn/RNN.cpp. How much memory cuDNN asks for, a
reserve that is kept for backward and a workspace, is not documented, but computed on the host. The rule here
was found on 2026-11-22 by asking `cudnnGetRNNTempSpaceSizes` of cuDNN 9.20.0 for thousands of layers
(docs/estimate.md), with PyTorch's settings. cuDNN rounds parts up to 16 bytes, which is left out: where rows
of the hidden size are no multiple of that, its sizes are up to 500 bytes larger. cuDNN 9.24 gives the same
sizes; 9.26 smaller workspaces for persistent kernels of small layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.backends.cudnn import CUDNN_TENSOR_DTYPES

from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.kernels.table import ANY_GPU, Kernel, copied_bytes, operators
from tb_memplugin.estimate.run.correction import Correction
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode, Rule
from tb_memplugin.estimate.run.known_values import values_of
from tb_memplugin.estimate.run.patches import Patches

aten = torch.ops.aten

RELU, TANH, LSTM, GRU = range(4)
"""Values of cudnnRNNMode_t."""

GATES = {RELU: 1, TANH: 1, LSTM: 4, GRU: 3}
"""Number of products for each step, by mode."""

_KEPT = {RELU: 1, TANH: 1, LSTM: 5, GRU: 6}
"""Vectors of the hidden size that backward reads, for each layer, direction, step and sequence."""

_STATES = {RELU: 2, TANH: 2, LSTM: 4, GRU: 2}
"""Copies of states, first and last, for each layer and direction, if results are padded."""

_FORWARD_STATES = {RELU: 3, TANH: 3, LSTM: 10, GRU: 5}
_BACKWARD_STATES = {RELU: 5, TANH: 5, LSTM: 11, GRU: 5}
"""Vectors of the hidden size for each layer, direction and sequence: states and their gradients."""

_PERSISTENT_BACKWARD = {RELU: 9, TANH: 9, LSTM: 12, GRU: 14}
"""Further vectors of the hidden size for each step and sequence in the backward of persistent kernels."""

_FORWARD_STEPS = 256
"""The most steps whose products one buffer holds in the forward of one direction."""

_FEWEST_ROWS = ((1, 32), (8, 16), (16, 8), (96, 4))
"""Steps that the layers of a stack compute together, by the largest number of sequences; 2 for more."""

_PRODUCTS_WORKSPACE = 8 << 20
_HEADER = 256

MODES = {"rnn_relu": RELU, "rnn_tanh": TANH, "lstm": LSTM, "gru": GRU}

SIZED = (
    "LSTM, GRU and RNN: what cuDNN keeps for backward (its reserve) and its workspaces are counted as "
    "cuDNN 9.20 sizes them."
)


class Recurrent(Correction):
    """Sends recurrent layers to cuDNN's operators, and adds fake implementations for these."""

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Register the layers for CUDA tensors, and flatten weights as cuDNN requires."""
        for name, kind in MODES.items():
            patches.register(f"{name}.input", _through_cudnn(kind), "AutogradCUDA")
            patches.register(f"{name}.data", _packed_through_cudnn(kind), "AutogradCUDA")
        original = nn.RNNBase.flatten_parameters
        patches.set(
            nn.RNNBase,
            "flatten_parameters",
            lambda layer: _flatten(layer) if _on_cuda(layer) else original(layer),
        )

    def rules(self) -> dict[Any, Rule]:
        """Return rules for cuDNN's operators."""
        return {aten._cudnn_rnn.default: self._forward, aten._cudnn_rnn_backward.default: self._backward}

    def _forward(self, mode: CountingFakeMode, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        self.target.note(SIZED)
        data, weights, stride, _, hx, cx, kind, hidden, projected, _, batch_first, _, train, *_ = args
        call = self._call(data, args[6:], forward=True)
        scope, row = mode.layers.scope(), mode.ledger.device_row(data.device)
        swaps = batch_first and not call.packed
        with mode:
            steps_first = data.transpose(0, 1) if swaps else data
            flat = len({weight.untyped_storage()._cdata for weight in weights}) == 1
            total = _buffer_elements(weights, stride, kind, hidden, projected)
            shape = (*steps_first.shape[:-1], call.result * call.directions)
            output = data.new_empty(shape)
            results = (
                output.transpose_(0, 1) if swaps else output,
                torch.empty_like(hx),
                torch.empty_like(cx) if cx is not None else data.new_empty(0),
            )
            reserve = data.new_empty(reserve_bytes(call) if train else 0, dtype=torch.uint8)
            buffer = data.new_empty(0 if flat else total)
        workspace = workspace_bytes(call, train=train)
        mode.hold([copied_bytes(steps_first), *results, buffer, workspace, reserve], func, scope, row)
        return *results, reserve, buffer

    def _backward(self, mode: CountingFakeMode, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        data, weights, stride, _, hx, cx, output, *gradients = args[:10]
        kind, hidden, projected, _, batch_first = args[10:15]
        call = self._call(data, args[10:19], forward=False)
        scope, row = mode.layers.scope(), mode.ledger.device_row(data.device)
        swaps = batch_first and not call.packed
        with mode:
            filled = [
                torch.empty_like(like) if gradient is None and like is not None else gradient
                for gradient, like in zip(gradients, (output, hx, cx), strict=True)
            ]
            steps_first = data.transpose(0, 1) if swaps else data
            gradient = filled[0].transpose(0, 1) if swaps else filled[0]
            results = [torch.empty(steps_first.shape, dtype=data.dtype, device=data.device)]
            results += [torch.empty_like(state) for state in (hx, cx) if state is not None]
            total = data.new_empty(_buffer_elements(weights, stride, kind, hidden, projected))
        mode.see([fresh for fresh, before in zip(filled, gradients, strict=True) if before is None], func)
        workspace, copied = workspace_bytes(call, train=True), copied_bytes(steps_first)
        mode.hold([copied, copied_bytes(gradient), *results, workspace], func, scope, row)
        pieces: list[Any] = [None] * len(weights)
        if args[-1][3]:
            with mode:
                pieces = _gradients(total, weights, projected, stride)
            mode.hold([copied, total, workspace, *pieces], func, scope, row)
        with mode:
            first = results[0].transpose_(0, 1) if swaps else results[0]
        return first, results[1], results[2] if cx is not None else None, pieces

    def _call(self, data: torch.Tensor, settings: Sequence[Any], *, forward: bool) -> RecurrentCall:
        """Return the call; `settings` are the operator's arguments from the mode on."""
        kind, hidden, projected, layers, batch_first, dropout, train, both, batch_sizes = settings[:9]
        packed = bool(batch_sizes)
        steps, sequences = data.shape[:2] if not batch_first else (data.shape[1], data.shape[0])
        gpu = self.target.gpu or ANY_GPU
        call = RecurrentCall(
            kind=kind,
            directions=2 if both else 1,
            features=data.shape[-1],
            hidden=hidden,
            projected=projected,
            layers=layers,
            drops=bool(train and dropout),
            steps=len(batch_sizes) if packed else steps,
            sequences=batch_sizes[0] if packed else sequences,
            rows=data.shape[:-1].numel(),
            packed=packed,
            element_bytes=data.element_size(),
            persistent=False,
            capability=gpu.compute_capability,
        )
        half = data.dtype is torch.float16
        return replace(call, persistent=is_persistent(call, gpu.processors, is_half=half, forward=forward))


def _buffer_elements(
    weights: Sequence[torch.Tensor], stride: int, kind: int, hidden: int, projected: int
) -> int:
    """Return the elements of cuDNN's buffer of weights, in which each layer has biases, used or not."""
    biases = 0 if _has_biases(stride, projected) else len(weights) // stride * 2 * GATES[kind] * hidden
    return sum(weight.numel() for weight in weights) + biases


def _has_biases(stride: int, projected: int) -> bool:
    return stride >= 4 + bool(projected)


def _gradients(
    total: torch.Tensor, weights: Sequence[torch.Tensor], projected: int, stride: int
) -> list[torch.Tensor]:
    """Return the gradients of the weights: views of one buffer, or copies if layers have no biases."""
    if _has_biases(stride, projected):
        return _pieces(total, weights)
    return [torch.empty_like(weight) for weight in weights]


def _through_cudnn(kind: int) -> Any:
    """Return the function for padded batches; its arguments are those of `torch.lstm`."""

    def run(data: torch.Tensor, hx: Any, params: Any, *settings: Any) -> Any:
        return _cudnn(kind, data, hx, params, [], *settings)

    return run


def _packed_through_cudnn(kind: int) -> Any:
    """Return the function for packed sequences."""

    def run(data: torch.Tensor, batch_sizes: torch.Tensor, hx: Any, params: Any, *settings: Any) -> Any:
        return _cudnn(kind, data, hx, params, lengths_of(batch_sizes), *settings)

    return run


def lengths_of(tensor: torch.Tensor) -> list[int]:
    """Return the values of a tensor of lengths, or of batch sizes at each time step.

    Raises:
        MemPluginError: the values are not known.
    """
    real = values_of(tensor)
    if real is None:
        raise MemPluginError(
            "pack_padded_sequence needs the values of the lengths, but fake tensors have no values.",
            where="torch.nn.utils.rnn.pack_padded_sequence",
            fix=(
                "Give the lengths as Python numbers, or use padded sequences, which estimates the memory "
                "of the longest batch."
            ),
        )
    return [int(value) for value in real.tolist()]


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
    flat = torch.cat([param.to(dtype).reshape(-1) for param in params])
    cast = [state.to(dtype) if state is not None else None for state in states]
    return data.to(dtype), _pieces(flat, params), *cast


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
    if weights[0].dtype not in CUDNN_TENSOR_DTYPES:  # bfloat16: `flatten_parameters` does nothing
        return
    storages = {weight.untyped_storage()._cdata for weight in weights}
    if len({id(weight) for weight in weights}) != len(weights) or len(storages) == 1:
        return
    with torch.no_grad():
        stride = len(weights) // (layer.num_layers * (2 if layer.bidirectional else 1))
        kind = MODES[layer.mode.lower()]
        total = _buffer_elements(weights, stride, kind, layer.hidden_size, layer.proj_size)
        flat = weights[0].new_empty(total)
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


@dataclass(frozen=True, slots=True)
class RecurrentCall:
    """One call of a recurrent layer.

    Attributes:
        kind: RELU, TANH, LSTM or GRU.
        projected: the size of results, if `proj_size` makes it differ from `hidden`; else 0.
        drops: whether layers of a stack drop results of each other.
        steps: the length of the longest sequence.
        rows: steps of all sequences together; fewer than `steps * sequences` if they are packed.
        element_bytes: 2, 4 or 8.
        persistent: whether the kernels keep weights in registers (`is_persistent`).
        capability: of the GPU, such as (8, 0).
    """

    kind: int
    directions: int
    features: int
    hidden: int
    projected: int
    layers: int
    drops: bool
    steps: int
    sequences: int
    rows: int
    packed: bool
    element_bytes: int
    persistent: bool
    capability: tuple[int, int]

    @property
    def result(self) -> int:
        """The size of a result in one direction."""
        return self.projected or self.hidden

    @property
    def stacks(self) -> int:
        """The number of weight matrices of one kind: layers times directions."""
        return self.layers * self.directions


def reserve_bytes(call: RecurrentCall) -> int:
    """Return the bytes that a forward in training keeps for backward."""
    vectors = call.stacks * _KEPT[call.kind] * call.hidden + (call.layers - 1) * call.directions * call.hidden
    if call.projected:
        vectors += call.stacks * (call.hidden + call.projected)
    bits = (call.layers - 1) * call.directions**2 * call.result * call.steps * call.sequences
    masks = bits // 8 if call.drops else 0
    return call.rows * vectors * call.element_bytes + masks + _HEADER


def workspace_bytes(call: RecurrentCall, *, train: bool) -> int:
    """Return the bytes of the workspace, which is freed after the forward, and after each half of a backward.

    In training, one size serves forward and backward.
    """
    forward, backward = _forward(call), _backward(call)
    elements = _weights(call) + (max(forward, backward) if train else forward)
    lengths = 0 if call.packed else 8 * call.sequences
    return elements * call.element_bytes + _products(call) + lengths + _HEADER


def _products(call: RecurrentCall) -> int:
    """Return the bytes of products' workspaces. On Ampere and Ada, a stack in one direction has none."""
    if call.capability[0] == 8 and call.layers > 1 and call.directions == 1:
        return 0
    return _PRODUCTS_WORKSPACE * call.stacks


def _weights(call: RecurrentCall) -> int:
    """Return the elements of a copy of all weight matrices, without biases."""
    inputs = call.features + (call.layers - 1) * call.directions * call.result
    each = GATES[call.kind] * call.hidden * (inputs + call.layers * call.result)
    return call.directions * (each + call.layers * call.hidden * call.projected)


def _forward(call: RecurrentCall) -> int:
    both, gates, hidden = call.directions == 2, GATES[call.kind], call.hidden
    states = _STATES[call.kind]
    row = 0 if call.packed else call.features + call.directions * call.result
    row += 4 * hidden if both else hidden * call.drops
    if call.projected:
        row += call.directions * hidden
    if call.persistent:
        row += (4 + call.directions) * gates * hidden
        state = (2 * states + both) * hidden
        return call.rows * row + call.stacks * call.sequences * (state - states * hidden * call.packed)
    at_once = call.rows if both else min(call.rows, _FORWARD_STEPS * call.sequences)
    row_at_once = call.directions * gates * hidden
    state = (_FORWARD_STATES[call.kind] + 2 * both - states * call.packed) * hidden
    if not call.packed:
        state -= 2 * (hidden - call.result)
    return call.rows * row + at_once * row_at_once + call.stacks * call.sequences * state


def _backward(call: RecurrentCall) -> int:
    both, hidden = call.directions == 2, call.hidden
    row = 0 if call.packed else 2 * call.features + 2 * call.directions * call.result
    row += call.directions**2 * max(call.features, hidden)
    if call.projected:
        row += call.directions * hidden
    if call.persistent:
        row += ((1 if call.layers == 1 else 2) * call.directions + _PERSISTENT_BACKWARD[call.kind]) * hidden
        state = (3 * _STATES[call.kind] + both) * hidden
        return call.rows * row + call.stacks * call.sequences * state
    state = (_BACKWARD_STATES[call.kind] + 2 * both - 2 * _STATES[call.kind] * call.packed) * hidden
    if not call.packed:
        state -= 4 * (hidden - call.result)
    elements = call.stacks * call.sequences * state
    if both:
        row += (2 if call.layers == 1 else 4) * hidden
    elif call.layers == 1:
        row += hidden
    else:
        elements += hidden * min(call.rows, call.sequences * _steps_between_layers(call))
    return call.rows * row + elements


def _steps_between_layers(call: RecurrentCall) -> int:
    """Return how many steps of gradients pass between layers of a stack in one direction."""
    together = next((steps for limit, steps in _FEWEST_ROWS if call.sequences <= limit), 2)
    if call.steps >= 128 and call.capability >= (8, 0):
        together = max(together, 8)
    return together * call.layers + max(together, 8)


def is_persistent(call: RecurrentCall, processors: int, *, is_half: bool, forward: bool) -> bool:
    """Return whether PyTorch asks cuDNN for persistent kernels (RNN.cpp, get_algo).

    Args:
        call: the call; its `persistent` is not read.
        processors: the number of the GPU's multiprocessors.
        is_half: whether numbers are float16. With bfloat16, cuDNN's sizes are those of its standard kernels.
        forward: whether it is the forward: the backward takes smaller layers only.
    """
    if call.projected or call.packed or (call.element_bytes != 4 and not is_half):
        return False
    simple = call.kind in (RELU, TANH)
    limit = (384 if simple else 192) if forward else (256 if simple else 128)
    return call.hidden <= limit or (is_half and _suits_static(call, processors))


def _suits_static(call: RecurrentCall, processors: int) -> bool:
    """Return RNN.cpp's use_persist_common_heuristics and use_persist_device_heuristics."""
    if (
        call.layers > 1
        or call.directions > 1
        or call.hidden > 1024
        or call.hidden % 128
        or call.features % 128
    ):
        return False
    count, steps = call.sequences, call.steps
    if call.capability == (7, 0):
        fits = count == 8 or (count % 16 == 0 and count not in (80, 112))
        return fits and any(
            steps >= least and count <= most for least, most in ((40, 128), (20, 96), (10, 32))
        )
    if call.capability[0] < 8 or call.capability[1] == 6 or processors < 98 or call.kind == GRU:
        return False
    if count % 8 or count > 128:
        return False
    return call.kind == LSTM or count < 96 or call.hidden < 896


KERNELS = (
    Kernel(
        operators("_thnn_fused_gru_cell"),
        source="cuda/RNN.cu:_thnn_fused_gru_cell_cuda",
        results=_gru_cell,
        rare="nn.GRUCell",
    ),
    Kernel(
        operators("_thnn_fused_gru_cell_backward"),
        source="cuda/RNN.cu:_thnn_fused_gru_cell_backward_cuda",
        results=_gru_cell_backward,
        rare="nn.GRUCell in training",
    ),
)
