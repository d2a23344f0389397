"""Backward passes of several threads at once: torch runs their nodes in turn, on one thread for each GPU.

So if several threads run layers, every node of a backward gets its layer before the backward begins.
That takes about two microseconds per node.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tb_memplugin.record.beside_dynamo import not_compiled_alone
from tb_memplugin.record.guard import UNOWNED
from tb_memplugin.record.torch_private.autograd import RUN_BACKWARD, current_graph_task, run_backward


@dataclass(eq=False)
class _Run:
    """A backward that runs: the thread that called it, and who has assigned layers to its nodes."""

    thread: int
    assigned_by: set[SharedBackward] = field(default_factory=set)


class SharedBackward:
    """Is told of every backward that begins while it is open.

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
