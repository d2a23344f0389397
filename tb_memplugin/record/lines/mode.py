"""A tracer's dispatch mode that also records the Python stacks of allocations and of autograd nodes."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from tb_memplugin.record.lines.ledger import LineLedger
from tb_memplugin.record.lines.stacks import NO_ROW, NOT_KEPT, NodeStacks, PythonStacks, forward_of
from tb_memplugin.record.torch_private.autograd import current_graph_task, current_node, sequence_number
from tb_memplugin.record.torch_private.dispatch import HiddenFromDynamo
from tb_memplugin.record.tracer.layers import Layers
from tb_memplugin.record.tracer.mode import StorageMode, must_hide_from_dynamo

_NOT_RECORDED = -2


@dataclass(slots=True)
class RecordedStacks:
    """The stacks of all threads, and the stacks that made each thread's autograd nodes."""

    stacks: PythonStacks = field(default_factory=PythonStacks)
    nodes: list[NodeStacks] = field(default_factory=list)


class LineMode(StorageMode):
    """A mode that gives every block the row of the stack that allocated it. Each thread has its own mode.

    Args:
        layers: the layers of the recording.
        ledger: the recording's ledger, which requests stacks from the mode.
        stacks: the table of stacks.
    """

    def __init__(self, layers: Layers, ledger: LineLedger, stacks: RecordedStacks) -> None:
        super().__init__(layers)
        ledger.stack_of_now[threading.get_ident()] = self._stack
        self._stacks = stacks
        self._nodes = NodeStacks(sequence_number())
        stacks.nodes.append(self._nodes)
        thread = threading.current_thread()
        self._thread = "" if thread is threading.main_thread() else thread.name
        self._row = _NOT_RECORDED

    def _note(self, out: Any, func: Any, began_ns: int) -> None:
        self._row = _NOT_RECORDED
        super()._note(out, func, began_ns)
        sequence = sequence_number()
        if sequence != self._nodes.last:
            self._nodes.add(sequence, self._stack(), func)
        self._row = _NOT_RECORDED  # an allocation before the next operator is noted takes a new stack

    def _stack(self) -> int:
        """Return the row of this operator's stack, which is recorded when first requested."""
        if self._row == _NOT_RECORDED:
            node = current_node() if current_graph_task() != -1 else None
            forward = NO_ROW if node is None else forward_of(node, self._nodes, self._stacks.nodes)
            name = node.name() if node is not None and forward > NOT_KEPT else ""
            self._row = self._stacks.stacks.here(self._thread, name, forward)
        return self._row


class LineModeBesideDynamo(HiddenFromDynamo, LineMode):
    """A `LineMode` that is hidden from dynamo; see `tracer.mode.StorageModeBesideDynamo`."""

    __torch_dispatch__ = LineMode.__torch_dispatch__


def line_mode(layers: Layers, ledger: LineLedger, stacks: RecordedStacks) -> LineMode:
    """Return a new mode for the calling thread."""
    return (LineModeBesideDynamo if must_hide_from_dynamo() else LineMode)(layers, ledger, stacks)
