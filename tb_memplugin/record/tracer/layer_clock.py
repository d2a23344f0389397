"""Record when layers begin and end, in forward and backward, and mark what each layer allocates.

The hooks run at each call of each layer, so they only note numbers: `calls` computes the rest when the block
ends.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import time_ns
from typing import Any

import torch
from torch import nn

from tb_memplugin.record.beside_dynamo import not_compiled_alone
from tb_memplugin.record.guard import UNOWNED, Failed
from tb_memplugin.record.history.recording import Allocator
from tb_memplugin.record.module_calls import Entered, Left
from tb_memplugin.record.modules import ModuleNames, ModuleRecorder, OuterResult, SeesOuterCalls
from tb_memplugin.record.torch_private.autograd import current_graph_task, input_metadata, queue_callback
from tb_memplugin.record.tracer.autograd_marks import AutogradMarks
from tb_memplugin.record.tracer.history_calls import BY_AUTOGRAD, NO_LAYER, Crossing
from tb_memplugin.record.tracer.shared_backward import SharedBackward
from tb_memplugin.trace.tables import MODULE_MARK

_MOST_NODES = 1000
"""How many handles of hooks on autograd nodes to keep before looking for nodes that are gone."""


class LayerClock(ModuleRecorder):
    """Records when layers begin and end, on every thread, and marks allocations with the running layer.

    In backward a layer begins when autograd reaches the node of its result, and ends when autograd reaches
    the node of another layer's result, or the node of its own input.

    Marks are per thread (torch: `user_metadata` is thread_local), so in backward the threads of autograd get
    the marks: see `AutogradMarks`.

    Args:
        most: how many crossings to keep; beyond that the oldest are dropped.
        allocator: the allocator that sets marks. None, or one without marks: nothing is marked.
    """

    def __init__(self, most: int, allocator: Allocator | None = None) -> None:
        super().__init__()
        self.crossings: deque[Crossing] = deque(maxlen=most)
        self.unseen = 0
        """How many layers are not watched, because they are inside compiled or scripted modules."""
        self._set_mark: Callable[[str], object] = lambda _: None
        self._mark: Callable[[], str] = lambda: ""
        if allocator is not None and allocator.set_mark is not None and allocator.mark is not None:
            self._set_mark, self._mark = allocator.set_mark, allocator.mark
        self._here = threading.local()
        self._threads: set[int] = set()
        self._autograd = AutogradMarks(allocator)
        self._backward = SharedBackward(lambda: len(self._threads) > 1, self._assign_layers)
        self._reached: dict[int, Callable[[object], None]] = {}
        self._reached_marking: dict[int, Callable[[object], None]] = {}
        self._nodes: list[Any] = []
        self._most_nodes = _MOST_NODES
        self._lock = threading.Lock()
        self._seen = object()
        self._on = True

    @property
    def has_marks(self) -> bool:
        """Whether layers mark what they allocate."""
        return bool(self._autograd.device_type)

    @property
    def shared(self) -> bool:
        """Whether backward passes of several threads ran at the same time, and not every node was told."""
        return self._backward.missed

    def start(
        self,
        models: Mapping[str, nn.Module],
        names: ModuleNames,
        outer_calls: SeesOuterCalls | None = None,
        outer_result: OuterResult | None = None,
        failed: Failed = UNOWNED.end,
    ) -> None:
        """Watch every module of the models that runs as Python code."""
        self._keys = [module.key for module in names.modules]
        rows = range(NO_LAYER, len(self._keys))
        self._reached = {row: self._reaching(row, marks=False) for row in rows}
        self._reached_marking = {row: self._reaching(row, marks=True) for row in rows}
        super().start(models, names, outer_calls, outer_result, failed)
        self._backward.start()
        self.unseen = len(names.modules) - len(
            {names.row_of[module] for module in self._module_calls.watched}
        )

    def stop(self) -> None:
        """Remove all hooks, including those on autograd nodes that still exist, and restore the mark.

        Another thread that is inside a module at this moment keeps its mark: only that thread can change it.
        """
        self._on = False
        self._backward.stop()
        super().stop()
        with self._lock:
            for handle in self._nodes:
                handle.remove()
            self._nodes.clear()
        if calls := self._calls():
            self._set_mark(calls[0][1])
            calls.clear()
        self._autograd.stop()

    def _calls(self) -> list[tuple[int, str]]:
        """Return the (row, mark before it) of every call that runs on this thread, outermost first."""
        try:
            calls: list[tuple[int, str]] = self._here.calls
        except AttributeError:
            calls = self._here.calls = []
            self._threads.add(threading.get_ident())
        return calls

    def _functions(self, row: int) -> tuple[Entered, Left]:
        """Return the functions that record the start and the end of a layer's calls."""
        set_mark, current, mark = self._set_mark, self._mark, MODULE_MARK + self._keys[row]
        calls_here, at_nodes, note = self._calls, self._at_nodes, self.crossings.append
        thread, task = threading.get_ident, current_graph_task

        def enter(_: object, args: Any, __: object) -> None:
            if self._on:
                calls = calls_here()
                at_nodes(args, calls[-1][0] if calls else NO_LAYER)
                calls.append((row, current()))
                set_mark(mark)
                note((time_ns(), row, task() != -1, thread()))

        def leave(_: object, __: Any, out: Any) -> None:
            if self._on:
                calls = calls_here()
                while calls:
                    inner, before = calls.pop()
                    if inner == row:
                        set_mark(before)
                        break
                note((time_ns(), -1 - row, task() != -1, thread()))
                at_nodes(out, row)

        return not_compiled_alone(enter), not_compiled_alone(leave)

    def _at_nodes(self, tensors: Any, row: int) -> None:
        """Record the start of a layer's backward (-1: none) when autograd reaches the tensors' nodes.

        A node belongs to the innermost layer, which is the first that gets here.
        """
        if isinstance(tensors, torch.Tensor):
            node: Any = tensors.grad_fn
            if node is not None:
                metadata = node.metadata
                if self._seen not in metadata:
                    metadata[self._seen] = row
                    marks = tensors.device.type == self._autograd.device_type
                    self._keep(
                        node.register_prehook((self._reached_marking if marks else self._reached)[row])
                    )
        elif isinstance(tensors, tuple | list):
            for inner in tensors:
                self._at_nodes(inner, row)
        elif isinstance(tensors, Mapping):
            for inner in tensors.values():
                self._at_nodes(inner, row)

    def _assign_layers(self, roots: Sequence[Any]) -> None:
        """Assign each node of a graph its layer: that of the last result of a layer before it in backward."""
        nodes = (getattr(root, "grad_fn", None) or getattr(root, "node", None) for root in roots)
        pending = [(node, NO_LAYER) for node in nodes if node is not None]
        visited = set()
        while pending:
            node, row = pending.pop()
            if node in visited:
                continue
            visited.add(node)
            if self._seen in node.metadata:
                row = node.metadata[self._seen]
            else:
                devices = (metadata.device.type for metadata in input_metadata(node))
                self._assign_layer(node, row, on_gpu=self._autograd.device_type in devices)
            pending += [(following, row) for following, _ in node.next_functions if following is not None]

    def _assign_layer(self, node: Any, row: int, *, on_gpu: bool) -> None:
        """Record which layer begins at a node. On a GPU, its thread is marked."""
        node.metadata[self._seen] = row
        self._keep(node.register_prehook((self._reached_marking if on_gpu else self._reached)[row]))

    def _keep(self, handle: Any) -> None:
        """Keep the handle of a node's hook until the node is gone."""
        with self._lock:
            self._nodes.append(handle)
            if len(self._nodes) > self._most_nodes:
                self._nodes = [kept for kept in self._nodes if kept.hooks_dict_ref() is not None]
                self._most_nodes = _MOST_NODES + 2 * len(self._nodes)

    def _reaching(self, row: int, *, marks: bool) -> Callable[[object], None]:
        """Return the hook for the nodes of a layer's results; -1: of tensors outside all layers."""
        here, note = self._here, self.crossings.append
        thread = threading.get_ident
        is_marked = self._autograd.marking(None if row < 0 else self._keys[row]) if marks else lambda: False

        def reached(_: object) -> None:
            if not self._on:
                return
            try:
                task = current_graph_task()
                if getattr(here, "task", None) != task:
                    here.task = task
                    queue_callback(self._done)
                note((time_ns(), row, True, -thread() if is_marked() else BY_AUTOGRAD))
            except BaseException as error:
                self._fail(error)

        return not_compiled_alone(reached)

    def _done(self) -> None:
        """Record that a backward has ended."""
        try:
            self._autograd.end()
            if self._on:
                self.crossings.append((time_ns(), NO_LAYER, True, BY_AUTOGRAD))
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Record nothing more, because of an error in a backward."""
        self._on = False
        (self._failed or UNOWNED.end)("the backward of a layer", error)
