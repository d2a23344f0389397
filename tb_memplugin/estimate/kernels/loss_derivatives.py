"""Compute the derivative of `binary_cross_entropy_with_logits` in place, as without dispatch modes.

For fake tensors each of its steps allocates a result (torch/csrc/autograd/FunctionsManual.cpp,
binary_cross_entropy_with_logits_backward: isTensorSubclassLike).
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tb_memplugin.estimate.run.correction import Correction
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode
from tb_memplugin.estimate.run.patches import Patches

_MEAN = 1


class LossDerivatives(Correction):
    """Wraps the function that `torch.nn.functional` calls."""

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
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


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
