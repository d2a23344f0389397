"""How much memory cuDNN asks for a recurrent layer: its reserve, kept for backward, and its workspace.

cuDNN does not document these sizes, but computes them on the host. The rule here was found on 2026-11-22 by
asking `cudnnGetRNNTempSpaceSizes` of cuDNN 9.20.0 for thousands of layers (docs/estimate.md), with PyTorch's
settings (aten/src/ATen/native/cudnn/RNN.cpp). cuDNN rounds parts up to 16 bytes, which is left out: where
rows of the hidden size are no multiple of that, its sizes are up to 500 bytes larger. cuDNN 9.24 gives the
same sizes; 9.26 smaller workspaces for persistent kernels of small layers.
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class RecurrentCall:
    """One call of a recurrent layer.

    Attributes:
        kind: RELU, TANH, LSTM or GRU.
        projected: the size of results, if `proj_size` makes it differ from `hidden`; else 0.
        drops: whether layers of a stack drop results of each other.
        steps: the length of the longest sequence.
        sequences: the number of sequences.
        rows: steps of all sequences together; fewer than `steps * sequences` if they are packed.
        packed: whether sequences are packed.
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
