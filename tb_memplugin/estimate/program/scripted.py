"""`torch.jit.script` and `torch.jit.trace`."""

from __future__ import annotations

from types import FunctionType
from typing import Any

import torch

from tb_memplugin.estimate.run.correction import Correction
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode
from tb_memplugin.estimate.run.patches import Patches

_NOTE = (
    "torch.jit: the Python program is estimated. TorchScript may fuse operators, and then allocates less "
    "than is counted."
)


class Scripted(Correction):
    """Makes TorchScript return the Python function or module that it gets, with a note."""

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Replace the functions of `torch.jit` that compile: they would compile our patches, too."""
        for name in ("script", "trace", "freeze", "optimize_for_inference"):
            patches.set(torch.jit, name, self._replacing(mode, getattr(torch.jit, name)))

    def _replacing(self, mode: CountingFakeMode, original: Any) -> Any:
        def same(program: Any, *args: Any, **options: Any) -> Any:
            if not mode.is_on() or _is_of_torch(program):
                return original(program, *args, **options)
            self.target.note(_NOTE)
            return program

        return same


def _is_of_torch(program: Any) -> bool:
    """Whether a function or class is torch's own, which needs the graphs of its formulas."""
    return isinstance(program, FunctionType | type) and program.__module__.startswith("torch.")
