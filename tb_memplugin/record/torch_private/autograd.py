"""Private names of autograd: its nodes, their numbers, and the engine that runs them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from tb_memplugin.record.torch_private.table import getter, name, private

NO_SEQUENCE = (1 << 64) - 1
"""The number of nodes that no operator made: those that accumulate a gradient into a parameter."""

sequence_number: Callable[[], int] = private(
    "torch._C._autograd._get_sequence_nr",
    "the number that the next autograd node of this thread gets: it tells which layer and line made a node",
    "the layers of what backward allocates are not known",
    instead=lambda: 0,
)
_node_number: Callable[[Any], Callable[[], int]] = getter(
    "torch._C._functions.AddmmBackward0._sequence_nr",
    "the number of an autograd node",
    "the layers of what backward allocates are not known",
    instead=lambda _: lambda: NO_SEQUENCE,
)
current_graph_task: Callable[[], int] = private(
    "torch._C._current_graph_task_id",
    "the number of the backward that runs on this thread, -1 for none",
    "what backward allocates counts as allocated outside of it",
    instead=lambda: -1,
)
current_node: Callable[[], Any] = private(
    "torch._C._current_autograd_node",
    "the autograd node that runs on this thread, None between nodes",
    "the layers and lines of what backward allocates are not known",
    instead=lambda: None,
)
is_multithreading_enabled: Callable[[], bool] = private(
    "torch._C._is_multithreading_enabled",
    "whether backward runs on threads of autograd, whose allocations are marked there",
    "what the backward of several threads on a GPU allocates is not told apart",
    instead=lambda: False,
)
queue_callback: Callable[[Callable[[], None]], None] = private(
    "torch.autograd.Variable._execution_engine.queue_callback",
    "calls a function when the backward that runs ends",
    "the recording of layers ends at its first backward, with a warning",
)
input_metadata: Callable[[Any], Any] = getter(
    "torch._C._functions.AddmmBackward0._input_metadata",
    "the devices of the gradients that a node receives",
    "what the backward of several threads on a GPU allocates is not told apart",
    instead=lambda _: (),
)
run_backward: Callable[..., Any] | None = private(
    "torch.autograd.graph._engine_run_backward",
    "the function through which Python starts each backward; its frame is the engine in stacks",
    "layers of backward passes of several threads at once may be wrong, which a note says",
    instead=None,
)
RUN_BACKWARD = name(
    "torch.autograd._engine_run_backward",
    "the name under which `torch.autograd.backward` calls it, where it is patched",
    "layers of backward passes of several threads at once may be wrong, which a note says",
)
_SAVED = name(
    "torch._C._functions.AddmmBackward0._raw_saved_mat1",
    "the tensors that a node saved for backward have names with this beginning",
    "what autograd saved before the recording has no label",
).removesuffix("mat1")


def node_number(node: Any) -> int:
    """Return the sequence number of an autograd node, `NO_SEQUENCE` if no operator made it."""
    return _node_number(node)()


_saved_of: weakref.WeakKeyDictionary[type, tuple[str, ...]] = weakref.WeakKeyDictionary()
"""Of the user's own functions, too, whose classes hold what was compiled for them."""


def saved_names(kind: type) -> tuple[str, ...]:
    """Return the names of the tensors that nodes of a class may have saved.

    Reading one raises a RuntimeError once it is freed. Their `data` is the tensor.
    """
    if kind not in _saved_of:
        _saved_of[kind] = tuple(saved for saved in dir(kind) if saved.startswith(_SAVED))
    return _saved_of[kind]
