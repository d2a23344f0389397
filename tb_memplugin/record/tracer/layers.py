"""Track which layer runs on each thread, in forward and backward, and the figures of each layer."""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from time import time_ns
from typing import Any, Protocol

import torch
from torch import nn

from tb_memplugin.record.beside_compiler import hidden_from_dynamo
from tb_memplugin.record.guard import UNOWNED, Guard, entry
from tb_memplugin.record.module_calls import Entered, Left
from tb_memplugin.record.modules import ModuleNames, ModuleRecorder
from tb_memplugin.record.optimizer_hooks import OptimizerStep
from tb_memplugin.record.storage_lifetimes import Block, Buffer, EntryKind, Ledger
from tb_memplugin.record.torch_private.autograd import (
    NO_SEQUENCE,
    current_graph_task,
    node_number,
    queue_callback,
    sequence_number,
)
from tb_memplugin.record.tracer.kernels import Counted, SavedNumbers, Unseen
from tb_memplugin.trace import Phase

_MOST_BOUNDARIES = 400_000


@dataclass(slots=True)
class LayerFigures:
    """The figures of one module without the modules inside it, except for `forward_ns` and `peak`.

    `peak` is the highest live bytes while the module ran, -1 if it never ran. `excess` is (a peak, how many
    of its bytes at most are there only because a dispatch mode is on): it holds while `peak` is that peak.
    """

    calls: int = 0
    peak: int = -1
    excess: tuple[int, int] = (-1, 0)
    allocations: int = 0
    allocated_bytes: int = 0
    frees: int = 0
    forward_ns: int = 0
    backward_ns: int = 0


@dataclass(slots=True)
class Frame:
    """A module call that is running. `sequence` is autograd's sequence number at its start."""

    row: int
    began_ns: int
    peak: int
    in_backward: bool
    sequence: int
    inner_ns: int = 0


Stretch = tuple[int, int]


@dataclass(slots=True)
class _RunningNode:
    """An autograd node that runs: the number of its backward, and a number of its own within that.

    `serial` is that of the first block that the node may have allocated.
    """

    task: int
    key: int
    began_ns: int = field(compare=False)
    serial: int = field(compare=False)


class Results(Protocol):
    """Hears of the results of operators, and of the steps of optimizers. Must not raise."""

    def ran(self, node: Any, out: Any) -> None:
        """Hear of an operator that this thread ran in an autograd node, None outside of backward."""

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Hear that an optimizer is about to step."""


@dataclass(slots=True)
class Layers:
    """The layers of all threads: their figures, and the latest time ranges of the phases.

    `making` are the stretches of forward that made autograd nodes; `nodes` those in which the functions of
    nodes ran, one within another where a node runs a backward. `results` hears of all results, once they are
    recorded.
    """

    ledger: Ledger
    names: ModuleNames
    figures: list[LayerFigures]
    forward: deque[Stretch]
    backward: deque[Stretch]
    optimizer: deque[OptimizerStep]
    making: deque[Stretch]
    nodes: deque[Stretch]
    on: bool = True
    problems: list[str] = field(default_factory=list)
    unseen: Unseen = field(default_factory=Unseen)
    threads: dict[int, ThreadLayers] = field(default_factory=dict)
    results: Results | None = None
    guard: Guard = UNOWNED

    @classmethod
    def of(cls, ledger: Ledger, names: ModuleNames, guard: Guard = UNOWNED) -> Layers:
        """Return layers that have not run. They keep at most as many stretches per phase as the ledger."""
        figures = [LayerFigures() for _ in names.modules]
        most = ledger.entries.maxlen
        forward, backward, making, nodes = (deque[Stretch](maxlen=most) for _ in range(4))
        steps = deque[OptimizerStep](maxlen=most)
        return cls(ledger, names, figures, forward, backward, steps, making, nodes, guard=guard)

    def failed(self, where: str, error: BaseException) -> None:
        """Stop tracing after an error of ours, and add a note to the trace.

        Raises:
            KeyboardInterrupt, SystemExit: the error is one.
        """
        if self.on:
            self.on = False
            self.problems.append(f"Tracing stopped early ({type(error).__name__}: {error})")
        self.guard.end(where, error)

    def here(self) -> ThreadLayers:
        """Return the layers of the calling thread."""
        ident = threading.get_ident()
        thread = self.threads.get(ident)
        if thread is None:
            thread = self.threads.setdefault(ident, ThreadLayers(self))
        return thread


class ThreadLayers:
    """The calls that run on one thread, and which calls made which autograd nodes.

    Attributes:
        last_ns: when a backward ended, as far as it is known: epoch nanoseconds.
        node_name: the autograd node that the last operator of a backward ran for, "" between nodes.
        node_level, node_peak: live bytes when that node began, and the highest since, if `ModeEffects`
            needs it.
    """

    def __init__(self, layers: Layers) -> None:
        self.layers, self.ledger = layers, layers.ledger
        self.numbers = SavedNumbers(layers.ledger)
        self.stack: list[Frame] = []
        self.nodes_from = array("q", [0])
        self.node_rows = array("q", [-1])
        self.backward_row = -1
        self.in_backward = False
        self._began_ns = self._layer_began_ns = 0
        self.last_ns = 0
        self.node_name = ""
        self.node_level = self.node_peak = 0
        self._task = self._outer_task = -1
        self._nodes: list[_RunningNode] = []
        self._sequence = sequence_number()

    def row_and_phase(self) -> tuple[int, Phase]:
        """Return the module's row (-1 for none) and the phase, without asking autograd."""
        if self.stack:
            frame = self.stack[-1]
            return frame.row, Phase.BACKWARD if frame.in_backward else Phase.FORWARD
        if self.in_backward:
            return self.backward_row, Phase.BACKWARD
        return -1, Phase.OTHER

    def settle(self) -> None:
        """Record the frees since the last entry, in this thread's current layer and phase."""
        if self.numbers.waiting:
            for row in self.numbers.settle():
                self.count(row, Counted(frees=1))
        if self.ledger.freed:
            row, phase = self.row_and_phase()
            frees = self.ledger.settle(row, phase)
            if row >= 0:
                self.layers.figures[row].frees += frees

    def count(self, row: int, counted: Counted) -> None:
        """Add counts to the figures of a layer (-1 for none), and raise the running call's peak."""
        if self.stack and counted.top > self.stack[-1].peak:
            self.stack[-1].peak = counted.top
        if row >= 0:
            figures = self.layers.figures[row]
            figures.allocations += counted.allocations
            figures.allocated_bytes += counted.bytes
            figures.frees += counted.frees
            if counted.top > figures.peak:
                figures.peak = counted.top

    def enter(self, row: int) -> None:
        """Record that a layer is called."""
        with self.ledger.lock:
            self.settle()
            in_backward = current_graph_task() != -1
            if self.in_backward and not in_backward:
                self.end_backward()
            level = self.ledger.level
            phase = Phase.BACKWARD if in_backward else Phase.FORWARD
            now = self.ledger.write(EntryKind.ENTER, None, row, phase)
            self.stack.append(Frame(row, now, level, in_backward, sequence_number()))
            self._boundary()

    def leave(self, row: int) -> None:
        """Record that a layer's call ended, also by an exception. Calls inside it that are open end, too."""
        with self.ledger.lock:
            if not any(frame.row == row for frame in self.stack):
                return  # entered before the trace began
            self.settle()
            while self.stack:
                frame = self.stack.pop()
                self._ended(frame)
                if frame.row == row:
                    break
            self._boundary()

    def _ended(self, frame: Frame) -> None:
        figures = self.layers.figures[frame.row]
        phase = Phase.BACKWARD if frame.in_backward else Phase.FORWARD
        now = self.ledger.write(EntryKind.EXIT, None, frame.row, phase, began=frame.began_ns)
        frame.peak = max(frame.peak, self.ledger.level)
        figures.peak = max(figures.peak, frame.peak)
        if frame.in_backward:
            figures.backward_ns += now - frame.began_ns - frame.inner_ns
        else:
            figures.forward_ns += now - frame.began_ns
            figures.calls += 1
        if self.stack:
            self.stack[-1].peak = max(self.stack[-1].peak, frame.peak)
            self.stack[-1].inner_ns += now - frame.began_ns
        elif not frame.in_backward:
            self.layers.forward.append((frame.began_ns, now))
            if sequence_number() > frame.sequence:
                self.layers.making.append((frame.began_ns, now))
        elif self.backward_row >= 0:
            outer = self.layers.figures[self.backward_row]
            outer.peak = max(outer.peak, frame.peak)

    def _boundary(self) -> None:
        self._sequence = sequence_number()
        if self._sequence < self.nodes_from[-1]:  # a new thread with an old one's ident
            self.nodes_from, self.node_rows = array("q", [0]), array("q", [-1])
        self._own(self._sequence, self.stack[-1].row if self.stack else -1)

    def _own(self, sequence: int, row: int) -> None:
        """Give the nodes from a number on to a layer, -1 for none."""
        self.nodes_from.append(sequence)
        self.node_rows.append(row)
        if len(self.nodes_from) > _MOST_BOUNDARIES:
            half = _MOST_BOUNDARIES // 2
            del self.nodes_from[:half], self.node_rows[:half]

    def in_node(
        self, task: int, node: Any, began_ns: int, added_to: Block | Buffer | None
    ) -> tuple[int, bool]:
        """Return the module's row of an operator in backward, and whether it recomputes.

        A device's backward runs on an autograd thread, with the modes of the thread that called backward.

        Args:
            task: the number of the backward. One that begins within another has a higher number.
            node: the autograd node that runs, None between nodes.
            added_to: what the operator adds something to. If it is older than the node, autograd sums
                gradients, when the node's function has returned.
        """
        if task > self._task:
            self._task = task
            queue_callback(entry(partial(self._task_ended, task), self.layers.failed, "a backward's end"))
        running = self.layers.threads.get(threading.get_ident(), self)
        if running.stack and running.stack[-1].in_backward:
            self._in_backward(task, began_ns, self.backward_row)
            self._sequence = sequence_number()
            return running.stack[-1].row, True
        # Between nodes autograd sums gradients; this counts as part of the previous node's layer.
        if node is None:
            self._end_nodes(task, began_ns)
            self.node_name, row = "", self.backward_row
        else:
            row = self._owner(task, node, began_ns)
            if added_to is not None and added_to.serial < self._nodes[-1].serial:
                self._end_nodes(task, began_ns)
                self.layers.nodes.append((began_ns, time_ns()))  # the sum is of no function
        if row != self.backward_row or not self.in_backward:
            self._in_backward(task, began_ns, row)
        self._made_nodes()
        return self.backward_row, False

    def _owner(self, task: int, node: Any, began_ns: int) -> int:
        sequence = node_number(node)
        if sequence == NO_SEQUENCE:
            variable = getattr(node, "variable", None)
            self._run(_RunningNode(task, -id(variable), began_ns, self.ledger.next_serial), node)
            return self.layers.names.owner_of.get(id(variable), (-1, ""))[0] if variable is not None else -1
        self._run(_RunningNode(task, sequence, began_ns, self.ledger.next_serial), node)
        return self.node_rows[bisect_right(self.nodes_from, sequence) - 1]

    def _run(self, running: _RunningNode, node: Any) -> None:
        """Note which node runs, and the end of others: of the one before, or of a backward in this one."""
        if self._nodes and self._nodes[-1] == running:
            return
        self._end_nodes(running.task + 1, running.began_ns)
        if not self._nodes or self._nodes[-1] != running:
            self._end_nodes(running.task, running.began_ns)
            self._nodes.append(running)
        self.node_name = node.name()
        self.node_level = self.node_peak = self.ledger.level

    def _end_nodes(self, task: int, now: int) -> None:
        """End the running nodes of a backward and of those within it."""
        while self._nodes and self._nodes[-1].task >= task:
            began = self._nodes.pop().began_ns
            if began < now:  # else its function ran no operator
                self.layers.nodes.append((began, now))

    def _made_nodes(self) -> None:
        """Give the nodes that an operator has made in a node to the layer of that node."""
        since, self._sequence = self._sequence, sequence_number()
        if torch.is_grad_enabled() and self._sequence > since:
            self._own(since, self.backward_row)
            self._own(self._sequence, self.stack[-1].row if self.stack else -1)

    def _task_ended(self, task: int) -> None:
        """Record that a backward has ended, with all that it freed."""
        with self.ledger.lock:
            if self.layers.on and self.in_backward:
                self.settle()
                now = time_ns()
                self._end_nodes(task, now)
                if task == self._outer_task:
                    self.last_ns = now
                    self._sequence = sequence_number()
                    self.end_backward()

    def _in_backward(self, task: int, began_ns: int, row: int) -> None:
        if not self.in_backward:
            self.in_backward, self._began_ns, self.backward_row = True, began_ns, -1
            self._outer_task = task
            self._sequence = sequence_number() - 1  # the operator has its node already
        if row != self.backward_row:
            self._leave_backward_layer(began_ns)
            self.backward_row = row
            if row >= 0:
                self._layer_began_ns = self.ledger.write(
                    EntryKind.ENTER, None, row, Phase.BACKWARD, now=began_ns
                )
                figures = self.layers.figures[row]
                figures.peak = max(figures.peak, self.ledger.level)

    def _leave_backward_layer(self, now: int) -> None:
        if self.backward_row >= 0:
            began = self._layer_began_ns
            ended = self.ledger.write(
                EntryKind.EXIT, None, self.backward_row, Phase.BACKWARD, began=began, now=now
            )
            self.layers.figures[self.backward_row].backward_ns += ended - began
        self.backward_row = -1

    def end_backward(self) -> None:
        """Record that the backward on this thread has ended. Call `settle` first."""
        self._end_nodes(0, self.last_ns)
        self._leave_backward_layer(self.last_ns)
        self.layers.backward.append((self._began_ns, self.last_ns))
        self.in_backward = False

    def outside(self, began_ns: int) -> None:
        """Record the end of an operator outside all layers; it is forward if it made an autograd node."""
        sequence = sequence_number()
        if sequence != self._sequence:
            self._sequence = sequence
            span = began_ns, time_ns()
            self.layers.forward.append(span)
            self.layers.making.append(span)

    def stop(self) -> None:
        """End the calls and the backward that still run."""
        self.settle()
        if self.in_backward:
            self.end_backward()
        while self.stack:
            self._ended(self.stack.pop())


class LayerCalls(ModuleRecorder):
    """Records every module call in `Layers`, and starts and stops the tracing of calls on other threads.

    Args:
        watch: starts the tracing of operators on the calling thread.
        unwatch: stops it.
    """

    def __init__(self, layers: Layers, watch: Any, unwatch: Any) -> None:
        super().__init__()
        self._layers, self._trace_thread, self._leave_thread = layers, watch, unwatch

    def entered(self, row: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record the start of a module call on this thread."""
        here = self._layers.here()
        is_outermost = not here.stack
        if is_outermost:
            self._trace_thread()
        here.enter(row)
        if is_outermost and self._outer_calls is not None:
            self._outer_calls.entered(module, args, kwargs)

    def left(self, row: int, *_: object) -> None:
        """Record the end of a module call on this thread."""
        here = self._layers.here()
        if len(here.stack) == 1 and self._outer_calls is not None:
            self._outer_calls.left()
        here.leave(row)
        if not here.stack:
            self._leave_thread()

    def _functions(self, row: int) -> tuple[Entered, Left]:
        return (
            hidden_from_dynamo(lambda *call: self.entered(row, *call) if self._layers.on else None),
            hidden_from_dynamo(lambda *call: self.left(row, *call) if self._layers.on else None),
        )
