"""Record when layers begin and end, in forward and backward, and mark what each layer allocates.

The hooks run at each call of each layer, so they only note numbers: `history_calls.py` computes the rest when
the block ends.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import time_ns
from typing import Any

import torch
from torch import nn

from tb_memplugin.record.beside_compiler import not_compiled_alone
from tb_memplugin.record.guard import UNOWNED, Failed, call_all, entry
from tb_memplugin.record.history.allocators import Allocator
from tb_memplugin.record.module_calls import Entered, Left
from tb_memplugin.record.modules import ModuleNames, ModuleRecorder, OuterResult
from tb_memplugin.record.storages import OuterCalls
from tb_memplugin.record.torch_private.autograd import (
    RUN_BACKWARD,
    current_graph_task,
    input_metadata,
    is_multithreading_enabled,
    queue_callback,
    run_backward,
)
from tb_memplugin.record.torch_private.dispatch import without_torch_functions
from tb_memplugin.record.torch_private.tensors import device_of, grad_fn_of
from tb_memplugin.record.tracer.history_calls import BY_AUTOGRAD, NO_LAYER, Crossing
from tb_memplugin.threads import DaemonThread
from tb_memplugin.trace.tables import MODULE_MARK

_BACKWARD = "the backward of a layer"

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
        outer_calls: OuterCalls | None = None,
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
            call_all(*(handle.remove for handle in self._nodes))
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

        def enter(_: object, args: Any, __: object) -> bool:
            if self._on:
                calls = calls_here()
                with without_torch_functions():
                    at_nodes(args, calls[-1][0] if calls else NO_LAYER)
                calls.append((row, current()))
                set_mark(mark)
                note((time_ns(), row, task() != -1, thread()))
            return True

        def leave(_: object, __: Any, out: Any) -> None:
            if self._on:
                calls = calls_here()
                while calls:
                    inner, before = calls.pop()
                    if inner == row:
                        set_mark(before)
                        break
                note((time_ns(), -1 - row, task() != -1, thread()))
                with without_torch_functions():
                    at_nodes(out, row)

        return not_compiled_alone(enter), not_compiled_alone(leave)

    def _at_nodes(self, tensors: Any, row: int) -> None:
        """Record the start of a layer's backward (-1: none) when autograd reaches the tensors' nodes.

        A node belongs to the innermost layer, which is the first that gets here.
        """
        if isinstance(tensors, torch.Tensor):
            node: Any = grad_fn_of(tensors)
            if node is not None:
                metadata = node.metadata
                if self._seen not in metadata:
                    metadata[self._seen] = row
                    marks = device_of(tensors).type == self._autograd.device_type
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
            task = current_graph_task()
            if getattr(here, "task", None) != task:
                here.task = task
                queue_callback(entry(self._done, self._fail, _BACKWARD))
            note((time_ns(), row, True, -thread() if is_marked() else BY_AUTOGRAD))

        return entry(not_compiled_alone(reached), self._fail, _BACKWARD)

    def _done(self) -> None:
        """Record that a backward has ended."""
        self._autograd.end()
        if self._on:
            self.crossings.append((time_ns(), NO_LAYER, True, BY_AUTOGRAD))

    def _fail(self, where: str, error: BaseException) -> None:
        """Record nothing more, because of an error in a backward."""
        self._on = False
        (self._failed or UNOWNED.end)(where, error)


@dataclass(eq=False)
class _Run:
    """A backward that runs: the thread that called it, and who has assigned layers to its nodes."""

    thread: int
    assigned_by: set[SharedBackward] = field(default_factory=set)


class SharedBackward:
    """Is told of every backward that begins while it is open.

    torch runs the nodes of several threads' backward passes in turn, on one thread for each GPU. So if
    several threads run layers, every node of a backward gets its layer before it begins. That takes about
    two microseconds per node.

    Args:
        is_crowded: whether several threads run layers.
        assign_layers: records the layers of the nodes behind some roots (tensors, or edges of the graph).
    """

    def __init__(
        self, is_crowded: Callable[[], bool], assign_layers: Callable[[Sequence[Any]], None]
    ) -> None:
        self._is_crowded, self._assign_layers = is_crowded, assign_layers
        self._listens = self._missed = False

    @property
    def missed(self) -> bool:
        """Whether a backward began while one of another thread ran whose nodes got no layers."""
        return self._missed or (not self._listens and self._is_crowded())

    def start(self) -> None:
        """Begin to listen, unless torch's function is not there or was replaced by another program."""
        with _lock:
            if run_backward is not None and vars(torch.autograd).get(RUN_BACKWARD) is run_backward:
                setattr(torch.autograd, RUN_BACKWARD, _run)
            self._listens = vars(torch.autograd).get(RUN_BACKWARD) is _run
            _open.append(self)

    def stop(self) -> None:
        """Stop to listen. Does nothing if it does not listen."""
        with _lock:
            if self in _open:
                _open.remove(self)
            if not _open and vars(torch.autograd).get(RUN_BACKWARD) is _run:
                setattr(torch.autograd, RUN_BACKWARD, run_backward)

    def begins(self, run: _Run, roots: Sequence[Any]) -> None:
        """Assign layers in a backward that begins, if another thread may have one at the same time."""
        is_within_another = current_graph_task() != -1  # which has looked at the others
        other_runs = (
            [] if is_within_another else [other for other in tuple(_running) if other.thread != run.thread]
        )
        if other_runs or self._is_crowded():
            self._assign_layers(roots)
            run.assigned_by.add(self)
        if any(self not in other.assigned_by for other in other_runs):
            self._missed = True


_open: list[SharedBackward] = []
_running: list[_Run] = []
_lock = threading.Lock()


@not_compiled_alone
def _run(roots: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    """Take the place of torch's own function, and call it."""
    assert run_backward is not None
    run = _Run(threading.get_ident())
    for listener in tuple(_open):
        try:
            listener.begins(run, roots)
        except BaseException as error:
            UNOWNED.end("the beginning of a backward", error)
    _running.append(run)
    try:
        return run_backward(roots, *args, **kwargs)
    finally:
        _running.remove(run)


logger = logging.getLogger("tb_memplugin")

_WAIT_S = 0.5


class AutogradMarks:
    """Marks what the threads of autograd allocate with the layer whose backward runs there.

    torch runs the backward of a GPU's tensors on a thread of its own, one per device (engine.cpp), and marks
    are per thread. So what other threads allocate at the same time can be told apart.

    Args:
        allocator: the allocator that sets marks. None, or one without marks: nothing is marked.
    """

    def __init__(self, allocator: Allocator | None) -> None:
        self.device_type = ""
        """The type of device whose tensors' backward can be marked, "" for none."""
        if allocator is not None and allocator.set_mark is not None and allocator.mark is not None:
            self.device_type, self._current_device = allocator.device_type, allocator.current_device
            self._set_mark, self._mark = allocator.set_mark, allocator.mark
        self._here = threading.local()
        self._devices: set[int] = set()

    def marking(self, key: str | None) -> Callable[[], bool]:
        """Return a function that marks the current thread with a module, or with none if `key` is None.

        It does nothing and returns False if there are no marks, or if backward runs on the thread that
        called it (`set_multithreading_enabled(False)`).
        """
        if not self.device_type:
            return lambda: False
        set_mark, current, here = self._set_mark, self._mark, self._here
        devices, device = self._devices, self._current_device
        mark = "" if key is None else MODULE_MARK + key

        def put() -> bool:
            if not is_multithreading_enabled():
                return False
            before = getattr(here, "mark", None)
            if before is None:
                devices.add(device())
            if mark or current() == before:  # what another tracer has set stays
                set_mark(mark)
                here.mark = mark
            return True

        return put

    def end(self) -> None:
        """Remove the mark of this thread, if it is one of autograd's: its backward has ended."""
        if hasattr(self._here, "mark") and self._mark().startswith(MODULE_MARK):
            self._set_mark("")

    def stop(self) -> None:
        """Remove the marks from the threads of autograd, each on its own thread, since no other can do so.

        If one of them runs the backward of another thread, wait for it for at most `_WAIT_S` seconds: it may
        itself wait for this thread. The mark then goes when it ends.
        """
        if self._devices:
            visits = DaemonThread(self._visit, "tb_memplugin marks")
            visits.start()
            visits.join(_WAIT_S)

    def _visit(self) -> None:
        for number in self._devices:
            try:
                _on_the_thread_of(torch.device(self.device_type, number), self.end)
            except Exception as error:  # the training goes on, whatever happens to us
                logger.debug("removing autograd's mark failed", exc_info=error)


class _Call(torch.autograd.Function):
    """Calls a function on the thread where autograd runs the backward of a tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, call: Callable[[], None]) -> torch.Tensor:
        ctx.call = call
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        ctx.call()
        return None, None


def _on_the_thread_of(device: torch.device, call: Callable[[], None]) -> None:
    """Call a function on the thread that runs a device's backward, without an allocation or a kernel."""
    with torch.inference_mode(mode=False), torch.enable_grad():
        nothing = torch.empty(0, device=device, requires_grad=True)
        _Call.apply(nothing, call).backward(torch.empty(0, device=device))  # type: ignore[no-untyped-call]
