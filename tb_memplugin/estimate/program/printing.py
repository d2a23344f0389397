"""`f"{loss:.4f}"` and `.numpy()` of fake tensors; values are assumed as for `.item()` (values.py)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._mode_utils import no_dispatch

from tb_memplugin.estimate.answer.hints import answer, kind_of, question, unanswered
from tb_memplugin.estimate.program.values import Asking, is_chosen
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode
from tb_memplugin.estimate.run.known_values import values_of
from tb_memplugin.estimate.run.patches import Patches


class Printing(Asking):
    """Formats fake tensors, and converts them to numpy arrays."""

    def rules(self) -> dict[Any, Any]:
        """Return no rules: these are not operators."""
        return {}

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Give fake tensors `__format__` and `numpy`, as plain tensors have them."""

        def numpy(tensor: torch.Tensor, *, force: bool = False) -> Any:
            return self._array(mode, tensor, force=force)

        patches.set(FakeTensor, "__format__", _formatted)
        patches.set(FakeTensor, "numpy", numpy)

    def _array(self, mode: CountingFakeMode, tensor: torch.Tensor, *, force: bool) -> Any:
        """Return an array of the known values; else filled with the hint's value, with ones for floats, with
        zeros for chosen indices and for bytes, as of pictures.

        Raises:
            TypeError, RuntimeError: as for a real tensor on a device, or one that requires grad.
            MemPluginError: the tensor holds other integers or booleans, and there is no hint.
        """
        if not force:
            _refuse_as_torch_does(tensor)
        asked = question(kind_of(tensor.dtype), "numpy", tensor)
        real = asked.kind == "number"
        values = values_of(tensor)
        if values is not None:
            with no_dispatch():
                return values.detach().clone().numpy()
        fill = answer(self._hints, asked)
        if fill is None:
            if not real and not is_chosen(tensor) and tensor.dtype is not torch.uint8:
                raise unanswered(asked)
            fill = 1.0 if real else 0
            self.target.note(
                f"The numbers of the array at {asked.place} are assumed to be {fill}; a hint can set them."
            )
        return np.full(tuple(tensor.shape), fill, dtype=str(tensor.dtype).removeprefix("torch."))


def _formatted(tensor: torch.Tensor, text: str) -> str:
    if tensor.dim() == 0 and text:
        return format(tensor.item(), text)
    return object.__format__(tensor, text)


def _refuse_as_torch_does(tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu":
        raise TypeError(
            f"can't convert {tensor.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor "
            "to host memory first."
        )
    if tensor.requires_grad:
        raise RuntimeError(
            "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead."
        )
