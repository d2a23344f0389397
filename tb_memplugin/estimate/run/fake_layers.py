"""Track which module runs during a fake run, in forward and backward, and when each phase begins and ends."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import time_ns
from typing import Any

import torch
from torch import nn

from tb_memplugin.estimate.run.fake_ledger import Scope
from tb_memplugin.record.modules import ModuleNames
from tb_memplugin.record.torch_private.autograd import (
    NO_SEQUENCE,
    current_graph_task,
    current_node,
    node_number,
    sequence_number,
)
from tb_memplugin.trace import Phase

Stretch = tuple[int, int]
Call = tuple[int, int, int, Phase]
"""(begin, end, row of the module, phase); times are epoch nanoseconds."""


@dataclass(slots=True)
class _Frame:
    row: int
    began_ns: int
    in_backward: bool


class FakeLayers:
    """The known modules, their calls, and the time ranges of each phase.

    An autograd node belongs to the module whose call created it: the sequence numbers at which calls begin
    and end are kept for that. Backward runs on the calling thread (see fake_recording.py), so one stack is
    enough.
    """

    def __init__(self) -> None:
        self.names = ModuleNames()
        self.forward: list[Stretch] = []
        self.backward: list[Stretch] = []
        self.optimizer: list[Stretch] = []
        self.calls: list[Call] = []
        self.in_optimizer = 0
        self.watch_root: Callable[[nn.Module], None] = self.add
        self._rows: dict[int, tuple[weakref.ref[nn.Module], int]] = {}
        self._stack: list[_Frame] = []
        self._nodes_from: list[int] = [0]
        self._node_rows: list[int] = [-1]
        self._began_ns = self._last_ns = 0
        self._sequence = sequence_number()
        self._backward_row = -1
        self._row_began_ns = 0
        self._in_backward = False
        self._kernel: Scope | None = None
        self._kernel_ns = 0

    def add(self, model: nn.Module, prefix: str = "") -> None:
        """Name the modules of a model. Modules that are already known keep their names."""
        fresh, offset = ModuleNames.of({prefix: model}), len(self.names.modules)
        self.names.modules += [
            replace(module, parent=module.parent + offset if module.parent >= 0 else -1)
            for module in fresh.modules
        ]
        for module in model.modules():
            if self.row_of(module) < 0:
                self._rows[id(module)] = (weakref.ref(module), fresh.row_of[id(module)] + offset)
        for key, (row, label) in fresh.owner_of.items():
            self.names.owner_of[key] = (row + offset, label)

    def row_of(self, module: nn.Module) -> int:
        """Return the row of a module, -1 if it is not known."""
        entry = self._rows.get(id(module))
        return entry[1] if entry is not None and entry[0]() is module else -1

    def entered(self, module: nn.Module, *_: object) -> None:
        """Record that a call of a module begins; a global forward pre-hook.

        An unknown module that is called outside all other calls is a new model.
        """
        row = self.row_of(module)
        if row < 0 and not self._stack and current_graph_task() == -1:
            model = getattr(module, "_orig_mod", module)  # torch.compile's wrapper is its model
            if self.row_of(model) < 0:
                self.watch_root(model)
            row = self.row_of(model)
            self._rows[id(module)] = (weakref.ref(module), row)
        if row >= 0:
            in_backward = current_graph_task() != -1
            if self._in_backward and not in_backward:
                self._end_backward()
            self._stack.append(_Frame(row, time_ns(), in_backward))
            self._boundary()

    def left(self, module: nn.Module, *_: object) -> None:
        """Record that a call of a module ended, normally or by an exception; a global forward hook."""
        row = self.row_of(module)
        if row < 0 or not any(frame.row == row for frame in self._stack):
            return
        while self._stack:
            frame = self._stack.pop()
            self._ended(frame)
            if frame.row == row:
                break
        self._boundary()

    def scope(self) -> Scope:
        """Return the module and phase in which the program is now."""
        if self._kernel is not None:
            return self._kernel
        if current_graph_task() != -1:
            return self._scope_in_backward()
        if self._in_backward:
            self._end_backward()
        if self._stack:
            return Scope(self._stack[-1].row, Phase.FORWARD)
        if self.in_optimizer:
            return _IN_OPTIMIZER
        if torch._C.is_grad_enabled():
            self._outside()
        return _OUTSIDE

    def row_of_ids(self, modules: Sequence[int]) -> int:
        """Return the row of the innermost known module among `id()`s of modules, -1 if none is known."""
        for module_id in reversed(modules):
            reference, row = self._rows.get(module_id, (None, -1))
            if reference is not None and id(reference()) == module_id:
                return row
        return -1

    @contextmanager
    def running_kernels(self, *, training: bool) -> Iterator[None]:
        """Run a compiled graph: inside this context, `run_kernel` tells the module.

        Args:
            training: whether autograd has a node for the graph, or the graph is a backward.
        """
        around, began = self.scope(), time_ns()
        inside = around
        if around.phase is Phase.OTHER and training:
            inside = replace(around, phase=Phase.FORWARD)
        self._kernel, self._kernel_ns = inside, began
        try:
            yield
        finally:
            self._end_kernel()
            self._kernel = None
            if inside is not around:
                self.forward.append((began, time_ns()))
            self.scope()  # backward lasts until here

    def run_kernel(self, row: int) -> None:
        """Say which module a compiled graph's operator is from; -1 keeps the one before."""
        if self._kernel is not None and row >= 0 and row != self._kernel.module:
            self._end_kernel()
            self._kernel = replace(self._kernel, module=row)

    def stop(self) -> None:
        """End the calls and the backward that are still running."""
        if self._in_backward:
            self._end_backward()
        while self._stack:
            self._ended(self._stack.pop())

    def _scope_in_backward(self) -> Scope:
        now = time_ns()
        if not self._in_backward:
            self._in_backward, self._began_ns, self._backward_row = True, now, -1
        self._last_ns = now
        self._sequence = max(self._sequence, sequence_number())  # with create_graph=True, it makes nodes
        if self._stack and self._stack[-1].in_backward:
            return Scope(self._stack[-1].row, Phase.BACKWARD, recomputing=True)
        row = self._owner(current_node())
        if row != self._backward_row:
            self._end_row(now)
            self._backward_row, self._row_began_ns = row, now
        return Scope(row, Phase.BACKWARD)

    def _owner(self, node: Any) -> int:
        if node is None:
            return self._backward_row
        sequence = node_number(node)
        if sequence == NO_SEQUENCE:
            variable = getattr(node, "variable", None)
            return self.names.owner_of.get(id(variable), (-1, ""))[0] if variable is not None else -1
        return self._node_rows[bisect_right(self._nodes_from, sequence) - 1]

    def _boundary(self) -> None:
        self._sequence = sequence_number()
        self._nodes_from.append(self._sequence)
        self._node_rows.append(self._stack[-1].row if self._stack else -1)

    def _ended(self, frame: _Frame) -> None:
        now = time_ns()
        self.calls.append(
            (frame.began_ns, now, frame.row, Phase.BACKWARD if frame.in_backward else Phase.FORWARD)
        )
        if not self._stack and not frame.in_backward:
            self.forward.append((frame.began_ns, now))

    def _end_kernel(self) -> None:
        now = time_ns()
        if self._kernel is not None and self._kernel.module >= 0:
            self.calls.append((self._kernel_ns, now, self._kernel.module, self._kernel.phase))
        self._kernel_ns = now

    def _end_row(self, now: int) -> None:
        if self._backward_row >= 0:
            self.calls.append((self._row_began_ns, now, self._backward_row, Phase.BACKWARD))

    def _end_backward(self) -> None:
        self._end_row(self._last_ns)
        self.backward.append((self._began_ns, self._last_ns + 1))
        self._in_backward, self._backward_row = False, -1

    def _outside(self) -> None:
        """Count operators outside all modules as forward if they created an autograd node."""
        sequence = sequence_number()
        if sequence != self._sequence:
            self._sequence = sequence
            now = time_ns()
            self.forward.append((now - 1, now))


_IN_OPTIMIZER = Scope(-1, Phase.OPTIMIZER)
_OUTSIDE = Scope()
