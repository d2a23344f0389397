"""Results that fake tensors get wrong: their strides, their shape, or the operators that make them.

Whether the next operator copies depends on strides. PyTorch has a formula of other operators for some
kernels, which it uses where a device has no kernel, such as CUDA in a PyTorch built without it, and where
FakeTensorMode does not know the shapes of results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from tb_memplugin.estimate.kernels.copies import contiguous_copies, contiguous_like_the_input
from tb_memplugin.estimate.kernels.table import Buffers, Call, Kernel, copied_bytes, operators
from tb_memplugin.estimate.program.values import make_one_hot
from tb_memplugin.estimate.run.correction import Correction
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode
from tb_memplugin.estimate.run.patches import Patches

aten = torch.ops.aten
HAS_RMS_NORM = hasattr(aten, "_fused_rms_norm_backward")
"""Older versions of torch have `_fused_rms_norm` only for other devices, with other arguments."""

ON_CUDA = ("silu_backward", "mish_backward", *(("_fused_rms_norm",) if HAS_RMS_NORM else ()))
"""Operators with kernels for CUDA and for CompositeImplicitAutograd in PyTorch 2.13 built with CUDA."""

_WITHOUT_A_RULE = (torch.float32, torch.float16)
"""Dtypes that kernels of `grouped_mm` take, but torch's fake implementation does not."""

_ALIGNED = 16
"""On a GPU, rows of a result of `grouped_mm` begin at multiples of this number of bytes."""


class FusedKernels(Correction):
    """Runs the backward of `silu` and `mish`, and `rms_norm` on CUDA, as one kernel."""

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Register a CUDA kernel, so that autograd passes the operator to the mode undecomposed."""
        if self.target.device_type != "cuda":
            return
        for name in ON_CUDA:
            if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
                patches.register(name, _never_called, "CUDA")


def _never_called(*_: Any) -> None:
    raise AssertionError("fake tensors reach no kernel")


class OneHot(Correction):
    """Makes `one_hot` of zeros, and a one scattered into each row, where the number of classes is given.

    Fake tensors compare with all classes instead, which takes a mask of the same shape (Onehot.cpp).
    """

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Wrap `torch.nn.functional.one_hot`."""
        original: Any = functional.one_hot

        def one_hot(tensor: Any, num_classes: int = -1) -> Any:
            if type(tensor) is not FakeTensor or not mode.is_here or num_classes <= 0:
                return original(tensor, num_classes)
            rows = torch.zeros((*tensor.shape, num_classes), dtype=torch.int64, device=tensor.device)
            rows.scatter_(-1, tensor.unsqueeze(-1), 1)
            make_one_hot(tensor, rows)
            return rows

        patches.set(functional, "one_hot", one_hot)


def _rms_norm(
    mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, Any]:
    """Return the result, and a number for each row, in the accumulation dtype, which backward reads."""
    data, shape = args[0], args[1]
    rows = (*data.shape[: data.dim() - len(shape)], *(1 for _ in shape))
    dtype = torch.float64 if data.dtype is torch.float64 else torch.float32
    result = mode.quietly(aten.empty_like.default, data, memory_format=torch.contiguous_format)
    return result, mode.quietly(aten.empty.memory_format, rows, dtype=dtype, device=data.device)


def _first_contiguous(
    mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Return contiguous gradients of the input; fake tensors lay them out like the gradient of the result."""
    first, *rest = mode.quietly(func, *args, **kwargs)
    return (first if first is None else _laid_out(mode, first, torch.contiguous_format), *rest)


def _of_two(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return what TensorIterator makes of the gradient and the other tensor."""
    return mode.quietly(
        aten.mul.Tensor, *(argument for argument in args if isinstance(argument, torch.Tensor))
    )


def _like_the_gradient(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    return mode.quietly(aten.empty_like.default, args[0])


def _contiguous(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return _laid_out(mode, mode.quietly(func, *args, **kwargs), torch.contiguous_format)


def _in_the_format_of_the_input(
    mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    return _laid_out(mode, mode.quietly(func, *args, **kwargs), suggest_memory_format(args[0]))


def _laid_out(mode: CountingFakeMode, out: Any, form: torch.memory_format) -> Any:
    if out.is_contiguous(memory_format=form):
        return out
    shape, dtype, device = out.shape, out.dtype, out.device
    return mode.quietly(aten.empty.memory_format, shape, dtype=dtype, device=device, memory_format=form)


def _product(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    left, right = args[:2]
    if left.dtype not in _WITHOUT_A_RULE or right.dtype is not left.dtype:
        return mode.quietly(func, *args, **kwargs)
    offsets = args[2] if len(args) > 2 else kwargs.get("offs")
    groups = len(offsets) if offsets is not None else None
    shape = _shape(left, right, groups)
    with mode:
        return torch.empty_strided(
            shape, _strides(shape, left), dtype=kwargs.get("out_dtype") or left.dtype, device=left.device
        )


def _shape(left: torch.Tensor, right: torch.Tensor, groups: int | None) -> list[int]:
    """Return the shape of the result.

    Either the rows, the columns or the inner dimension are divided into groups, or both operands are stacks.
    """
    if left.dim() == 2 and right.dim() == 2 and groups is not None:
        return [groups, left.shape[0], right.shape[1]]
    if left.dim() == 3 and right.dim() == 3:
        return [left.shape[0], left.shape[1], right.shape[2]]
    return [left.shape[-2], right.shape[-1]]


def _strides(shape: Sequence[int], like: torch.Tensor) -> list[int]:
    step = _ALIGNED // like.element_size() if like.device.type == "cuda" else 1
    row = -(-shape[-1] // step) * step
    return [shape[1] * row, row, 1] if len(shape) == 3 else [row, 1]


def _with_a_mask(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Any) -> tuple[Any, Any]:
    """Return what is rounded, and which elements were within the range, for backward."""
    return mode.quietly(aten.empty_like.default, args[0]), mode.quietly(
        aten.empty_like.default, args[0], dtype=torch.bool
    )


def _sampled(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    images, grid = args
    return mode.quietly(aten.new_empty.default, images, (*images.shape[:2], *grid.shape[1:3]))


def _gradients_of_sampled(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    form = torch.contiguous_format
    return tuple(mode.quietly(aten.empty_like.default, each, memory_format=form) for each in args[:2])


def _expanded_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a copy of an expanded tensor (cudnn/Utils.h, contiguousIfZeroInStrides)."""
    return tensor.numel() * tensor.element_size() if 0 in tensor.stride() else 0


def _copied_before(call: Call) -> Buffers:
    """Return a contiguous copy of the input, which is made before the results."""
    return [copied_bytes(call["input"]), *call.out]


def _copied_around(call: Call) -> Buffers:
    """Return contiguous copies: of the input, before the results, and of the gradient, after them."""
    return [copied_bytes(call["input"]), *call.out, [copied_bytes(call["grad_out"])]]


def _weighted(call: Call) -> Buffers:
    """Return the product of gradient and result, as TensorIterator lays it out, and contiguous copies."""
    read = (call["grad_output"], call["output"])
    left, right = (torch.empty_strided(each.shape, each.stride(), device="meta") for each in read)
    size = read[0].nbytes
    return [size, 0 if (left * right).is_contiguous() else size, copied_bytes(read[1])]


KERNELS = (
    Kernel(
        operators("mish_backward"),
        source="Activation.cpp:mish_backward",
        on="",
        results=_of_two,
    ),
    Kernel(
        operators("_fused_rms_norm") if HAS_RMS_NORM else (),
        _copied_before,
        source="cuda/layer_norm_kernel.cu:_fused_rms_norm_cuda",
        results=_rms_norm,
    ),
    Kernel(
        operators("native_layer_norm"), _copied_before, source="cuda/layer_norm_kernel.cu:layer_norm_cuda"
    ),
    Kernel(
        operators("native_layer_norm_backward", "_fused_rms_norm_backward"),
        _copied_around,
        source="cuda/layer_norm_kernel.cu:layer_norm_backward_cuda, _fused_rms_norm_backward_cuda",
        results=_first_contiguous,
    ),
    Kernel(
        operators("mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward", "glu_backward"),
        source=(
            "Loss.cpp:mse_loss_backward and its like: zeros_like(input, LEGACY_CONTIGUOUS_MEMORY_FORMAT); "
            "cuda/GatedLinearUnit: glu_backward_cuda"
        ),
        results=contiguous_like_the_input,
    ),
    Kernel(
        operators("elu_backward", "softplus_backward", "hardswish_backward", "hardsigmoid_backward"),
        source="Activation.cpp: TensorIterator lays the result out like its first operand, the gradient",
        results=_of_two,
    ),
    Kernel(
        operators("_log_softmax_backward_data"),
        contiguous_copies("grad_output", "output"),
        source="cuda/SoftMax.cu:host_softmax_backward",
        results=_contiguous,
    ),
    Kernel(
        operators("_softmax_backward_data"),
        _weighted,
        source="cuda/SoftMax.cu:softmax_backward_cuda_out, host_softmax_backward",
        results=_contiguous,
    ),
    Kernel(
        operators("multi_margin_loss_backward", "multilabel_margin_loss_backward"),
        contiguous_copies("self"),
        source="cuda/MultiMarginLoss.cu, cuda/MultiLabelMarginCriterion.cu: what they call contiguous on",
        results=contiguous_like_the_input,
    ),
    Kernel(
        operators("rrelu_with_noise"),
        contiguous_copies("self"),
        source="cuda/RreluWithNoise.cu:_rrelu_with_noise_cuda_train",
        results=_contiguous,
    ),
    Kernel(
        operators("log_sigmoid_backward"),
        source="Activation.cpp:log_sigmoid_backward_cuda",
        results=_like_the_gradient,
    ),
    Kernel(
        operators("pixel_unshuffle"),
        source="PixelShuffle.cpp:pixel_unshuffle",
        results=_contiguous,
    ),
    Kernel(
        operators("upsample_bilinear2d"),
        source="UpSample.h:upsample_2d_common_check",
        results=_in_the_format_of_the_input,
    ),
    Kernel(
        operators(
            "fake_quantize_per_tensor_affine_cachemask",
            "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
            "fake_quantize_per_channel_affine_cachemask",
            "_fused_moving_avg_obs_fq_helper",
        ),
        source="quantized/FakeQuantPerTensorAffine.cpp, FakeQuantPerChannelAffine.cpp",
        on="",
        results=_with_a_mask,
        rare="training that is aware of quantization",
    ),
    Kernel(
        operators("cudnn_grid_sampler"),
        lambda call: [copied_bytes(call["grid"]), call.out],
        source="cudnn/GridSampler.cpp:cudnn_grid_sampler_forward",
        results=_sampled,
        rare="grid_sample in float32 with align_corners=True",
    ),
    Kernel(
        operators("cudnn_grid_sampler_backward"),
        lambda call: [copied_bytes(call["grid"]), _expanded_bytes(call["grad_output"]), *call.out],
        source="cudnn/GridSampler.cpp:cudnn_grid_sampler_backward",
        results=_gradients_of_sampled,
        rare="grid_sample in float32 with align_corners=True",
    ),
    Kernel(
        operators("_grouped_mm"),
        source="GroupedMMUtils.h:_grouped_mm_fallback",
        on="",
        results=_product,
        rare="experts in float32 and float16",
    ),
)
