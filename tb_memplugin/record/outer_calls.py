"""See what enters the outermost module calls from outside, and what these calls write to.

No operator runs for that: a tensor counts how often it was written to, because autograd needs that. The count
is that of the tensor and all its views, but not of `tensor.data`. Tensors made in inference mode have none.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from tb_memplugin.record.modules import ModuleNames
from tb_memplugin.record.storages import Sighting, sight, versions_of
from tb_memplugin.record.tensors_inside import tensors_in
from tb_memplugin.record.torch_private.dispatch import tracing_state, without_torch_functions
from tb_memplugin.trace import Category
from tb_memplugin.trace.labels import INPUT_OF

See = Callable[[list[Sighting], list[torch.UntypedStorage]], object]
"""Called with sightings of category `INPUT`, and the storage of each, which must not be kept."""


_referent = weakref.ref.__call__


class OuterCalls:
    """Tells which tensors enter outermost module calls, and when the call ends, which of them it wrote to.

    Tensors are held weakly. May be used on several threads. If a profile records stacks, each Python call
    here is an event in the user's own profile, so the counts of all tensors are read in one.

    Args:
        see: is called with the tensors' storages, on the thread of the call.
    """

    def __init__(self, names: ModuleNames, see: See) -> None:
        self._names, self._see = names, see
        self._here = _CallInputs()

    def entered(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the tensors among the arguments of a call that is within no other."""
        here = self._here
        here.references = []
        if tracing_state() is not None:
            return
        row = self._names.row_of.get(id(module), -1)
        here.label = INPUT_OF + (self._names.modules[row].name if row >= 0 else type(module).__name__)
        tensors = list(tensors_in((args, kwargs)))
        with without_torch_functions():
            here.versions = versions_of(tensors)
            here.references = list(map(weakref.ref, tensors))
            self._report(tensors, here.versions, ends_call=False)

    def left(self) -> None:
        """Note the tensors that the call which ends has written to."""
        here = self._here
        references, here.references = here.references, []
        alive = [
            (tensor, version)
            for tensor, version in zip(map(_referent, references), here.versions, strict=False)
            if tensor is not None
        ]
        with without_torch_functions():
            now = versions_of([tensor for tensor, _ in alive])
            written = [
                (tensor, after)
                for (tensor, before), after in zip(alive, now, strict=True)
                if after > before >= 0
            ]
            if written:
                tensors, versions = zip(*written, strict=True)
                self._report(tensors, versions, ends_call=True)

    def _report(self, tensors: Sequence[torch.Tensor], versions: Sequence[int], *, ends_call: bool) -> None:
        kept: list[torch.UntypedStorage] = []
        label = self._here.label
        purposes = ((tensor, Category.INPUT, -1, label) for tensor in tensors)
        self._see(sight(purposes, keep=kept, versions=versions, ends_call=ends_call), kept)


class _CallInputs(threading.local):
    """What entered the outermost call of this thread: tensors, and how often each had been written to."""

    def __init__(self) -> None:
        self.label = ""
        self.references: list[weakref.ref[torch.Tensor]] = []
        self.versions: list[int] = []
