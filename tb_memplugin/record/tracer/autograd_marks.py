"""Mark what the threads of autograd allocate with the layer whose backward runs there.

torch runs the backward of a GPU's tensors on a thread of its own, one per device (engine.cpp), and marks are
per thread. So what other threads allocate at the same time can be told apart.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import torch

from tb_memplugin.record.history.recording import Allocator
from tb_memplugin.record.torch_private.autograd import is_multithreading_enabled
from tb_memplugin.trace.tables import MODULE_MARK

logger = logging.getLogger(__name__)

_WAIT_S = 0.5


class AutogradMarks:
    """Sets and removes marks on the threads of autograd.

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
            visits = threading.Thread(target=self._visit, name="tb_memplugin marks", daemon=True)
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
