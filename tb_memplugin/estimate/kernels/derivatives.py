"""Derivatives that torch computes in another way for fake tensors, and what it adds or combines in place.

Under any dispatch mode, autograd's formulas allocate results where they otherwise write into a summand
(torch/csrc/autograd/FunctionsManual.cpp: areAnyTensorSubclassLike), and take the way that is also right for
zeros in a product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from tb_memplugin.estimate.kernels.table import HALVES
from tb_memplugin.estimate.run.correction import Correction
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode, Rule
from tb_memplugin.estimate.run.patches import Patches

aten = torch.ops.aten

_NOTE = (
    "Derivatives of prod and cumprod are estimated for inputs without zeros; with a zero they use "
    "several times as much memory."
)
Original = Callable[..., torch.Tensor]
_MEAN = 1


class BiasInPlace(Correction):
    """Counts the bias of `linear` as added in place where the input is not contiguous (Linear.cpp, linear).

    Contiguous inputs use `addmm`, which has no separate addition.
    """

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Wrap the function that layers call."""
        original: Any = functional.linear

        def linear(*args: Any, **kwargs: Any) -> Any:
            if not mode.is_here or any(
                type(argument) is not FakeTensor for argument in (*args, *kwargs.values())
            ):
                return original(*args, **kwargs)  # a real run also adds out of place for subclasses (DTensor)
            with mode.adding_in_place():
                return original(*args, **kwargs)

        patches.set(functional, "linear", linear)


class MasksInPlace(Correction):
    """Writes into the first mask what autograd's engine computes from two.

    Examples are the derivatives of `clamp` with tensors, `max` and `min` (clamp_backward and
    evenly_distribute_backward).
    """

    def rules(self) -> dict[Any, Rule]:
        """Return a rule for the operator."""
        return {aten.logical_and.default: _combined}


def _combined(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    first, second = args
    fits = torch.broadcast_shapes(first.shape, second.shape) == first.shape
    if first.dtype is torch.bool and fits and mode.is_called_by_engine():
        return mode.quietly(aten.logical_and_.default, first, second)
    return mode.quietly(func, *args, **kwargs)


class LossDerivatives(Correction):
    """Computes the derivative of `binary_cross_entropy_with_logits` in place (its `_backward`)."""

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Replace it; only fake inputs that require grad are handled differently."""
        original: Any = torch.binary_cross_entropy_with_logits

        def loss(
            input: Any,  # noqa: A002  # torch's name
            target: Any,
            weight: Any = None,
            pos_weight: Any = None,
            reduction: int = _MEAN,
        ) -> Any:
            plain = type(input) is FakeTensor and mode.is_here and input.requires_grad
            if not plain or target.requires_grad or torch.is_inference_mode_enabled():
                return original(input, target, weight, pos_weight, reduction)
            tensors = [_cast(tensor) for tensor in (input, target, weight, pos_weight)]
            apply: Any = _WithLogits.apply
            return apply(original, *tensors, reduction)

        patches.set(torch, "binary_cross_entropy_with_logits", loss)


def _cast(tensor: Any) -> Any:
    """Return a tensor in float32 under autocast, which computes this loss so."""
    if tensor is None or not torch.is_autocast_enabled(tensor.device.type):
        return tensor
    return tensor.float() if tensor.dtype in HALVES else tensor


class _WithLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, original: Any, logits: Any, target: Any, weight: Any, more: Any, how: int) -> Any:
        ctx.save_for_backward(logits, target, weight, more)
        ctx.how = how
        return original(logits, target, weight, more, how)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        logits, target, weight, more = ctx.saved_tensors
        if torch.is_grad_enabled():  # for derivatives of derivatives, in steps that autograd can follow
            answer = _in_steps(logits, target, more) * gradients[0]
            answer = answer if weight is None else answer * weight
            return None, answer / (logits.numel() if ctx.how == _MEAN else 1), None, None, None, None
        if more is None:
            answer = logits.sigmoid().sub_(target)
        else:
            weighted = more.mul(target)
            answer = weighted.add(1).sub_(target).mul_(logits.sigmoid()).sub_(weighted)
        answer.mul_(gradients[0])
        if weight is not None:
            answer.mul_(weight)
        if ctx.how == _MEAN:
            answer.div_(logits.numel())
        return None, answer, None, None, None, None


def _in_steps(logits: Any, target: Any, more: Any) -> Any:
    if more is None:
        return logits.sigmoid() - target
    weighted = more * target
    return (weighted + 1 - target) * logits.sigmoid() - weighted


class ProductDerivatives(Correction):
    """Computes the derivatives of `prod` and `cumprod` by division, as a real run does if no number is zero.

    Fake tensors take several times as much memory (prod_backward, cumprod_backward).
    """

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
