"""What losses hold besides their results.

Their code is the same on all devices: it calls other operators. Some reduce the losses of all elements in the
memory of these, which the result keeps. Sizes were measured with torch.profiler on the CPU and with PyTorch's
CUDA build (2.13.0).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._mode_utils import no_dispatch

from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.kernels.copies import contiguous_like_the_input, within
from tb_memplugin.estimate.kernels.reductions import Layout, reduction
from tb_memplugin.estimate.kernels.table import ANY_GPU, Buffers, Call, Kernel, copied_bytes, operators
from tb_memplugin.estimate.run.correction import Correction
from tb_memplugin.estimate.run.known_values import values_of
from tb_memplugin.estimate.run.patches import Patches

if TYPE_CHECKING:
    from tb_memplugin.estimate.run.fake_mode import CountingFakeMode


def _in_the_memory_of_all(
    mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    out = mode.quietly(func, *args, **kwargs)
    call = Call(func, args, kwargs, out, ANY_GPU)
    return within(mode, out, _pairs(call)) if call["reduction"] else out


def _pairs(call: Call) -> int:
    return prod(torch.broadcast_shapes(call["self"].shape, call["target"].shape))


def _reduced(call: Call, before: list[int]) -> Buffers:
    """Return what the losses are reduced with, on a GPU also the buffers of the reduction."""
    if call.out.device.type != "cuda":
        return before
    return reduction(Layout.contiguous((_pairs(call),), call.out.dtype), call.gpu, before=before)


def _averaged(call: Call) -> Buffers:
    """Return the losses of all elements, if they are reduced to one number."""
    return () if call.out.dim() else _reduced(call, [call.out.untyped_storage().nbytes()])


def _averaged_apart(call: Call) -> Buffers:
    """Return the number to which a GPU reduces the losses, before it is copied to the result."""
    if call.out.dim() or call.out.device.type != "cuda":
        return ()
    return _reduced(call, [call.out.element_size()])


def _huber(call: Call) -> Buffers:
    return () if call.out.dim() else _reduced(call, [_pairs(call) * call.out.element_size()])


def _with_logits(call: Call) -> Buffers:
    """Return the log-sigmoid of the input, and the losses if they are reduced."""
    size = _pairs(call) * call.out.element_size()
    return _reduced(call, [size, size]) if call["reduction"] else [size]


def _exponentials(call: Call) -> Buffers:
    """Return `-target` and its product with the input. The exponentials die before the result is made."""
    return [call.out.nbytes] * 2


class CtcLoss(Correction):
    """Computes `ctc_loss` as LossCTC.cpp does, which reads lengths on the host."""

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Replace `torch.ctc_loss`; lengths that are not known are the greatest, with a note."""
        original: Any = torch.ctc_loss

        def listed(lengths: Any, greatest: int) -> Any:
            values = values_of(lengths) if isinstance(lengths, torch.Tensor) else lengths
            if values is None:
                self.target.note(f"Lengths of ctc_loss are not known: they are assumed to be {greatest}.")
                return [greatest] * lengths.numel()
            with no_dispatch():
                return values.tolist() if isinstance(values, torch.Tensor) else list(values)

        def ctc_loss(
            log_probs: Any,
            targets: Any,
            inputs: Any,
            lengths: Any,
            blank: int = 0,
            reduction: int = 1,
            zero_infinity: bool = False,
        ) -> Any:
            if not mode.is_on() or log_probs.dim() != 3:
                return original(log_probs, targets, inputs, lengths, blank, reduction, zero_infinity)
            if log_probs.device.type == "cuda":
                _refuse_cudnn(log_probs, targets, blank)
            targets, longest = targets.to(log_probs.device, torch.long), listed(lengths, targets.shape[-1])
            steps = listed(inputs, log_probs.shape[0])
            loss = torch._ctc_loss(log_probs, targets, steps, longest, blank, zero_infinity)[0]
            if zero_infinity:
                loss = torch.where(loss == torch.inf, torch.zeros((), device=loss.device), loss)
            if reduction == 1:
                loss = (loss / loss.new_tensor(longest).clamp(min=1)).mean()
            return loss.sum() if reduction == 2 else loss

        patches.set(torch, "ctc_loss", ctc_loss)


def _refuse_cudnn(log_probs: torch.Tensor, targets: torch.Tensor, blank: int) -> None:
    """Raise where cuDNN computes a loss: of targets in int32, one after the other, with blank 0."""
    if blank or targets.dim() != 1 or (log_probs.dtype, targets.dtype) != (torch.float32, torch.int32):
        return
    raise MemPluginError(
        "cuDNN computes this CTC loss, with buffers that are not known.",
        where="torch.nn.functional.ctc_loss",
        fix="Give targets of dtype torch.long: PyTorch's own kernel computes these.",
    )


def _ctc(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return a loss for each sample, and the probabilities of each step and of twice the longest target."""
    log_probs, longest = args[0], max(args[3], default=0)
    with mode:
        batch = log_probs.shape[1]
        alpha = log_probs.new_empty((batch, log_probs.shape[0], 2 * longest + 1))
        return log_probs.new_empty(batch), alpha


def _ctc_buffers(call: Call) -> Buffers:
    """Return lengths and offsets of targets on the GPU; in backward also the probabilities from behind."""
    alpha = call.get("log_alpha")
    results = reversed(call.out) if alpha is None else [alpha.nbytes, call.out]
    return [*[8 * call["log_probs"].shape[1]] * 3, *results]


def _margins(call: Call) -> Buffers:
    """Return contiguous copies, and the losses of all samples if they are reduced to one number."""
    data, out = call["self"], call.out[0] if isinstance(call.out, tuple) else call.out
    copies = [copied_bytes(data), copied_bytes(call["target"])]
    if out.dim() or data.dim() < 2:
        return copies
    losses = Layout.contiguous(data.shape[:1], out.dtype)
    return reduction(losses, call.gpu, before=[*copies, len(data) * out.element_size()])


KERNELS = (
    Kernel(
        operators("_ctc_loss"), _ctc_buffers, source="cuda/LossCTC.cu:ctc_loss_gpu_template", results=_ctc
    ),
    Kernel(
        operators("_ctc_loss_backward"),
        _ctc_buffers,
        source="cuda/LossCTC.cu:ctc_loss_backward_gpu_template",
        results=contiguous_like_the_input,
    ),
    Kernel(
        operators("mse_loss", "smooth_l1_loss"),
        _averaged,
        source="Loss.cpp:mse_loss_out, smooth_l1_loss_out",
        on="",
        results=_in_the_memory_of_all,
    ),
    Kernel(
        operators("binary_cross_entropy", "soft_margin_loss"),
        _averaged_apart,
        source="cuda/Loss.cu:binary_cross_entropy_out_cuda, Loss.cpp:soft_margin_loss_out",
        on="",
        results=_in_the_memory_of_all,
    ),
    Kernel(operators("huber_loss"), _huber, source="Loss.cpp:huber_loss", on=""),
    Kernel(
        operators("binary_cross_entropy_with_logits"),
        _with_logits,
        source="Loss.cpp:binary_cross_entropy_with_logits",
        on="",
    ),
    Kernel(
        operators("multi_margin_loss", "multilabel_margin_loss_forward"),
        _margins,
        source="cuda/MultiMarginLoss.cu:multi_margin_loss_cuda_out, cuda/MultiLabelMarginCriterion.cu",
    ),
    Kernel(
        operators("soft_margin_loss_backward"),
        _exponentials,
        source="Loss.cpp:soft_margin_loss_backward_out",
        on="",
        rare="training with soft_margin_loss",
    ),
)
