"""Compute the derivatives of `prod` and `cumprod` by division, as a real run does if no number is zero.

Fake tensors use the way that is also right for zeros and takes several times as much memory
(torch/csrc/autograd/FunctionsManual.cpp, prod_backward, cumprod_backward).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tb_memplugin.estimate.run.correction import Correction
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode
from tb_memplugin.estimate.run.patches import Patches

_NOTE = (
    "Derivatives of prod and cumprod are estimated for inputs without zeros; with a zero they use "
    "several times as much memory."
)
Original = Callable[..., torch.Tensor]


class ProductDerivatives(Correction):
    """Wraps the functions and methods that programs call."""

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Replace them; only fake tensors that require grad are handled differently."""
        for owner in (torch, torch.Tensor):
            for name, derivative in (("prod", _OfProduct), ("cumprod", _OfRunningProduct)):
                patches.set(owner, name, self._replaced(mode, getattr(owner, name), derivative))

    def _replaced(self, mode: CountingFakeMode, original: Original, derivative: Any) -> Original:
        def product(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor: Any = args[0] if args else None
            plain = type(tensor) is FakeTensor and mode.is_here and not kwargs.keys() - {"dim", "keepdim"}
            along = args[1] if len(args) > 1 else kwargs.get("dim")
            if not plain or not tensor.requires_grad or not tensor.dim() or not _is_dimension(along):
                return original(*args, **kwargs)
            self.target.note(_NOTE)
            return derivative.apply(original, args, kwargs, tensor)  # type: ignore[no-any-return]

        return product


def _is_dimension(along: Any) -> bool:
    return along is None or type(along) is int


class _OfProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, original: Original, args: Any, kwargs: Any, tensor: torch.Tensor) -> torch.Tensor:
        product = original(*args, **kwargs)
        ctx.along = _dimension(args, kwargs)
        ctx.lost = ctx.along is not None and not (args[2] if len(args) > 2 else kwargs.get("keepdim"))
        ctx.save_for_backward(tensor, product)
        return product

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        tensor, product = ctx.saved_tensors
        gradient = gradients[0]
        if ctx.lost:
            gradient, product = gradient.unsqueeze(ctx.along), product.unsqueeze(ctx.along)
        zero = tensor == 0
        looked = None if ctx.along is None else (zero, zero.sum(ctx.along, keepdim=True))
        del zero
        answer = gradient * (product / tensor).conj()
        del looked  # live to the end, as in the real derivative
        return None, None, None, answer


class _OfRunningProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, original: Original, args: Any, kwargs: Any, tensor: torch.Tensor) -> torch.Tensor:
        products = original(*args, **kwargs)
        ctx.along = _dimension(args, kwargs)
        ctx.save_for_backward(tensor, products)
        return products

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        tensor, products = ctx.saved_tensors
        weighted = products.conj() * gradients[0]
        zero = tensor == 0  # live to the end, as in the real derivative
        turned = weighted.flip(ctx.along)
        summed = turned.cumsum(ctx.along)
        back = summed.flip(ctx.along)
        del turned, summed  # in C++ they are temporaries of one statement
        answer = back.div(tensor.conj())
        del zero
        return None, None, None, answer


def _dimension(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[1] if len(args) > 1 else kwargs.get("dim")
