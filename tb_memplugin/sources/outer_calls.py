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

from tb_memplugin.sources.modules import ModuleNames
from tb_memplugin.sources.provenance import INPUT_OF
from tb_memplugin.sources.storages import Sighting, sight, version_of
from tb_memplugin.sources.tensors_inside import tensors_in
from tb_memplugin.trace import Category

See = Callable[[list[Sighting], list[torch.UntypedStorage]], object]
"""Called with sightings of category `INPUT`, and the storage of each, which must not be kept."""


class OuterCalls:
    """Tells which tensors enter outermost module calls, and when the call ends, which of them it wrote to.

    Tensors are held weakly. May be used on several threads.

    Args:
        names: the modules of the models.
        see: is called with the tensors' storages, on the thread of the call.
        failed: is told of errors; nothing is raised.
    """

    def __init__(self, names: ModuleNames, see: See, failed: Callable[[Exception], object]) -> None:
        self._names, self._see, self._failed = names, see, failed
        self._here = _Given()

    def entered(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the tensors among the arguments of a call that is within no other."""
        here = self._here
        here.tensors = []
        if torch._C._get_tracing_state() is not None:
            return
        try:
            row = self._names.row_of.get(id(module), -1)
            here.label = INPUT_OF + (self._names.modules[row].name if row >= 0 else type(module).__name__)
            given = list(tensors_in((args, kwargs)))
            here.tensors = [(weakref.ref(one), version_of(one)) for one in given]
            self._tell(given, is_end=False)
        except Exception as error:  # noqa: BLE001  # the training goes on, whatever happens to us
            self._failed(error)

    def left(self) -> None:
        """Note the tensors that the call which ends has written to."""
        here = self._here
        given, here.tensors = here.tensors, []
        try:
            written = [
                tensor
                for reference, version in given
                if version >= 0 and (tensor := reference()) is not None and version_of(tensor) > version
            ]
            if written:
                self._tell(written, is_end=True)
        except Exception as error:  # noqa: BLE001  # see entered
            self._failed(error)

    def _tell(self, tensors: Sequence[torch.Tensor], *, is_end: bool) -> None:
        kept: list[torch.UntypedStorage] = []
        label = self._here.label
        seen = sight(((one, Category.INPUT, -1, label) for one in tensors), keep=kept, ends_call=is_end)
        self._see(seen, kept)


class _Given(threading.local):
    """What entered the outermost call of this thread: tensors, and how often each had been written to."""

    def __init__(self) -> None:
        self.label = ""
        self.tensors: list[tuple[weakref.ref[torch.Tensor], int]] = []
