"""Find the gradients that backward gives to weights, without a hook on any of them.

A gradient may be gone when the iteration ends, so it must be seen while it is there. While an iteration is
watched, a dispatch mode sees every operator, with the autograd node that runs it. That of a weight is
`AccumulateGrad` (torch: csrc/autograd/functions/accumulate_grad.cpp): its operators make the gradient, or add
to it, and the node keeps it in `weight.grad` before the thread runs another operator.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from threading import get_ident
from typing import Any

import torch
from torch import nn

from tb_memplugin.record.guard import UNOWNED, Guard
from tb_memplugin.record.iterations.recording import IterationRecording
from tb_memplugin.record.iterations.weights import divided, stretches
from tb_memplugin.record.storage_lifetimes import Block, Buffer


@dataclass(slots=True)
class _Pending:
    """A weight whose node ran the last operator of a thread. No tensor is held: that would delay its free.

    `result` is the last result that may have become its gradient: (bytes, its blocks).
    """

    weight: weakref.ref[nn.Parameter]
    weight_id: int
    name: str
    result: tuple[int, list[Block | Buffer]] | None = None
    is_named: bool = False


class NewGradients:
    """Names the gradients of weights in a recording, as soon as they are there, and keeps their sizes.

    Args:
        weights: the weights by name; held weakly.
        recording: the recording of the iteration.
        guard: ends errors.

    Attributes:
        bytes: the bytes of the last gradient of each weight that backward made, by name.
    """

    def __init__(
        self, weights: Mapping[str, nn.Parameter], recording: IterationRecording, guard: Guard = UNOWNED
    ) -> None:
        self.bytes: dict[str, int] = {}
        self._recording, self._guard = recording, guard
        self._names = {id(weight): (weakref.ref(weight), name) for name, weight in weights.items()}
        self._pending: dict[int, _Pending] = {}

    def ran(self, node: Any, out: Any) -> None:
        """Hear of an operator that this thread ran in an autograd node, None outside of backward."""
        self._safely(lambda: self._look(node, out))

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at the gradients of an optimizer's weights: another thread may have made them, unseen."""
        self._safely(lambda: self._look_at(optimizer))

    def settle(self) -> None:
        """Name the gradients after which no operator ran."""
        for thread in list(self._pending):
            self._settle(thread)

    def forget(self) -> None:
        """Drop all that was found, and hear of no more operators."""
        self._recording.layers.results = None
        self._pending.clear()
        self._names.clear()

    def _safely(self, look: Callable[[], None]) -> None:
        try:
            look()
        except BaseException as error:
            self._guard.end("a gradient", error)

    def _look_at(self, optimizer: torch.optim.Optimizer) -> None:
        for weight in chain.from_iterable(group["params"] for group in optimizer.param_groups):
            name = self._name_of(weight)
            if name is not None and name not in self.bytes and weight.grad is not None:
                self._name_gradient(name, weight, weight.grad)

    def _name_of(self, weight: object) -> str | None:
        reference, name = self._names.get(id(weight), (None, ""))
        return name if reference is not None and reference() is weight else None

    def _look(self, node: Any, out: Any) -> None:
        thread = get_ident()
        weight: Any = getattr(node, "variable", None)
        pending = self._pending.get(thread)
        if pending is not None and (weight is None or pending.weight() is not weight):
            self._settle(thread)
            pending = None
        name = None if weight is None else self._name_of(weight)
        if name is None:
            return
        if pending is None:
            pending = self._pending[thread] = _Pending(weakref.ref(weight), id(weight), name)
        # With create_graph the node adds out of place: what it makes is not the gradient that is there.
        out_of_place = torch.is_grad_enabled()
        is_there = weight.grad is not None
        if out_of_place or not (is_there or pending.is_named):
            is_result = isinstance(out, torch.Tensor) and out.shape == weight.shape
            pending.result = (size_of(out), self._recording.blocks_of(out)) if is_result else pending.result
        elif is_there:
            pending.result = None
        if is_there:
            pending.is_named = True
            self._name_gradient(name, weight, weight.grad)

    def _settle(self, thread: int) -> None:
        pending = self._pending.pop(thread)
        weight = pending.weight()
        if weight is not None and weight.grad is not None:
            self._name_gradient(pending.name, weight, weight.grad)
        elif pending.result is not None:
            self.bytes[pending.name], blocks = pending.result
            self._recording.name_freed_gradient(pending.weight_id, pending.name, blocks)

    def _name_gradient(self, name: str, weight: nn.Parameter, gradient: torch.Tensor) -> None:
        self.bytes[name] = size_of(gradient)
        self._recording.name_gradient(weight, name)


def size_of(gradient: torch.Tensor) -> int:
    """Return the bytes of a gradient: of its storages, or of its own stretch if it lies in a larger one."""
    own = list(stretches(gradient))
    if len(own) == 1 and own[0].end - own[0].start < own[0].bytes:
        return own[0].end - own[0].start  # in a bucket, for example
    return divided({"": own})[""]
