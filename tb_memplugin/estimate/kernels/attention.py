"""Run `scaled_dot_product_attention` with the kernel that the target GPU would use.

Fake tensors always use the math path, which materialises the scores: 57 MiB where flash attention takes 7.
The GPU decides the order of kernels (`GpuSpec.sdpa_order`), sdp_utils.cpp in
aten/src/ATen/native/transformers/cuda has the limits of each (can_use_flash_attention and similar functions),
and the program chooses with `torch.nn.attention.sdpa_kernel` which are allowed.

Flash attention accepts no mask. For fake tensors, transformers keeps every mask (`is_tracing`,
masking_utils.py); here it omits masks that mask nothing, as in a real run: values.py answers that nothing is
padded or packed, unless a hint says otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.modules.module import register_module_forward_pre_hook

from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.gpu_spec import GpuSpec
from tb_memplugin.estimate.kernels.attention_buffers import BLACKWELL, RECENT
from tb_memplugin.estimate.kernels.table import HALVES
from tb_memplugin.estimate.run.correction import Correction
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode, Rule
from tb_memplugin.estimate.run.patches import Patches

aten = torch.ops.aten

_FLASH_STEP = 8
"""Flash attention pads head dimensions to a multiple of this (sdp_utils, pad_last_dim)."""

CUDNN_ASKED = ((8, 0), (9, 0), (10, 0))
_UNASKED = (
    "On this GPU, workspaces of scaled_dot_product_attention with cuDNN are counted as on a GPU of another "
    "generation, for which cuDNN was asked."
)
_ONE_QUERY = (
    "On this GPU, scaled_dot_product_attention with cuDNN divides the keys of a single query into parts. "
    "Their workspace is not counted: up to 12 times the result in float32 was seen, freed as the call ends."
)

_MASK_STEP = 8
"""The efficient kernel needs masks whose strides are multiples of this (attention.cpp, aligned_tensor)."""

FLASH_DIM, CUDNN_DIM, CUDNN_DIM_HOPPER = 256, 128, 256
CUDNN_DIMS_BLACKWELL = (192, 128)
"""Sizes of queries and values that cuDNN takes on Blackwell beside those up to `CUDNN_DIM`."""

CUDNN_DIMS_LEARNING = ((192, 128), (256, 256))
"""The same for a backward, on Hopper and Blackwell, since `RECENT` (check_cudnn_d256_bprop_head_dim)."""

SWITCHES = {"cudnn": "cudnn", "flash": "flash", "efficient": "mem_efficient", "math": "math"}
NUMBERS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
"""Values of torch.nn.attention.SDPBackend."""

USUAL_ORDERS = ([1, 2, 0, 3], [3, 1, 2, 0])
"""PyTorch's orders, if the program gives none: on most GPUs, and on those where it prefers cuDNN."""

DEFAULT_ORDER = ("flash", "efficient", "math")
"""The order if no particular GPU is given."""


class Attention(Correction):
    """Calls the kernel's own operator, for which PyTorch has a fake implementation and a derivative."""

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Register `attend` for CUDA tensors, below autocast and above autograd's formulas."""
        self._mode = mode
        patches.register("scaled_dot_product_attention", self.attend, "AutogradCUDA")

    def rules(self) -> dict[Any, Rule]:
        """Return a rule for the whole operator, which inference mode does not divide."""
        return {aten.scaled_dot_product_attention.default: self._undivided}

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        """Compute the operator as the target does. The arguments are the operator's own."""
        call = AttentionCall(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, self.target.gpu)
        chosen = kernel(call)
        if chosen == "flash":
            return _padded_flash(call, scale)
        if chosen == "cudnn":
            if call.capability not in CUDNN_ASKED:
                self.target.note(_UNASKED)
            elif call.query.shape[-2] == 1 and call.capability >= BLACKWELL:
                self.target.note(_ONE_QUERY)
            mask = _as_bias(call)
            return aten._scaled_dot_product_cudnn_attention(
                query, key, value, mask, call.needs_grad, dropout_p, is_causal, False, scale=scale
            )[0]
        if chosen == "efficient":
            bias = _padded(_as_bias(call))
            if bias is not None:
                bias = bias.expand(*query.shape[:2], query.shape[-2], key.shape[-2])
            return aten._scaled_dot_product_efficient_attention(
                query, key, value, bias, call.needs_grad, dropout_p, is_causal, scale=scale
            )[0]
        mask = _as_bias(call)
        with self._mode.adding_in_place():  # the mask to the scores (attention.cpp)
            return aten._scaled_dot_product_attention_math(
                query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )[0]

    def _undivided(self, mode: CountingFakeMode, func: Any, args: Any, kwargs: Any) -> Any:
        with mode.running(recorded=True):
            return self.attend(*args, **kwargs)


def _padded_flash(call: AttentionCall, scale: float | None) -> Any:
    size = call.query.shape[-1]
    extra = -size % _FLASH_STEP
    tensors = [call.query, call.key, call.value]
    if extra:
        tensors = [F.pad(tensor, (0, extra)) for tensor in tensors]
        scale = scale if scale is not None else size**-0.5
    out = aten._scaled_dot_product_flash_attention(*tensors, call.dropout, call.causal, False, scale=scale)[0]
    return out[..., :size] if extra else out


def _as_bias(call: AttentionCall) -> torch.Tensor | None:
    """Convert a boolean mask into an additive one (attention.cpp, convert_boolean_attn_mask)."""
    mask = call.mask
    if mask is None or mask.dtype is not torch.bool:
        return mask
    dtype = call.query.dtype
    kept, left_out = (torch.scalar_tensor(n, dtype=dtype, device=mask.device) for n in (0.0, float("-inf")))
    return torch.where(mask, kept, left_out)


def _padded(bias: torch.Tensor | None) -> torch.Tensor | None:
    if bias is None or (
        bias.stride(-1) == 1 and not any(stride % _MASK_STEP for stride in bias.stride()[:-1])
    ):
        return bias
    size = bias.shape[-1]
    return F.pad(bias, (0, _MASK_STEP - size % _MASK_STEP))[..., :size]


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of `scaled_dot_product_attention`: its arguments, and the target."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    causal: bool
    grouped: bool
    gpu: GpuSpec | None

    @property
    def capability(self) -> tuple[int, int]:
        """The GPU's compute capability; (8, 0) if no particular GPU is given."""
        return self.gpu.compute_capability if self.gpu is not None else (8, 0)

    @property
    def needs_grad(self) -> bool:
        """Whether a backward may follow."""
        tensors = (self.query, self.key, self.value)
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def kernel(call: AttentionCall) -> str:
    """Return the kernel for a call: "cudnn", "flash", "efficient" or "math".

    Raises:
        MemPluginError: none of the kernels that the program allows can run the call.
    """
    backends: Any = torch.backends.cuda
    allowed: dict[str, Any] = {
        name: getattr(backends, f"{switch}_sdp_enabled") for name, switch in SWITCHES.items()
    }
    for name in _order(call.gpu):
        can: Callable[[AttentionCall], bool] = _CAN[name]
        if allowed[name]() and can(call):
            return name
    raise MemPluginError(
        "No allowed kernel of scaled_dot_product_attention can run this call: query "
        f"{tuple(call.query.shape)}, {call.query.dtype}, {'a' if call.mask is not None else 'no'} mask.",
        where=call.gpu.name if call.gpu is not None else "a GPU of no kind in particular",
        fix="Allow another kernel in torch.nn.attention.sdpa_kernel. A real run on this GPU needs that too.",
    )


def _order(gpu: GpuSpec | None) -> tuple[str, ...]:
    """Return the names of the kernels to try: the program's own order, if it has one, else the GPU's."""
    priority_order: Any = getattr(torch._C, "_get_sdp_priority_order", list)  # torch 2.6 has none
    chosen = [number for number in priority_order() if number in NUMBERS]
    if chosen and chosen not in USUAL_ORDERS:
        return tuple(NUMBERS[number] for number in chosen)
    return (*(gpu.sdpa_order if gpu is not None else DEFAULT_ORDER), "cudnn")


def _dense(call: AttentionCall, *, grouped: bool) -> bool:
    tensors = (call.query, call.key, call.value)
    if any(tensor.dim() != 4 for tensor in tensors):
        return False
    heads = [tensor.shape[1] for tensor in tensors]
    same_batch = all(tensor.shape[0] == call.query.shape[0] for tensor in tensors)
    alike = heads[0] == heads[1] == heads[2]
    fewer = heads[1] == heads[2] and heads[0] % max(heads[1], 1) == 0
    allowed = (call.grouped and grouped) or (RECENT and heads[1] == 1)
    contiguous = all(tensor.stride(-1) == 1 or tensor.shape[-1] == 1 for tensor in tensors)
    not_empty = all(tensor.shape[-2] > 0 for tensor in tensors)
    return same_batch and (alike or (fewer and allowed)) and contiguous and not_empty


def _flash(call: AttentionCall) -> bool:
    size = call.query.shape[-1]
    alike = size == call.key.shape[-1] == call.value.shape[-1]
    if call.mask is not None or not alike or size > FLASH_DIM or call.query.dtype not in HALVES:
        return False
    small_shared_memory = call.capability in ((8, 6), (8, 9), (12, 0)) and call.needs_grad
    if small_shared_memory and (192 < size <= 224 or (size > 224 and call.dropout > 0)):
        return False
    if call.causal and call.query.shape[-2] != call.key.shape[-2]:
        return False
    return call.capability >= (8, 0) and _dense(call, grouped=True)


def _efficient(call: AttentionCall) -> bool:
    dtype = call.query.dtype
    halves = HALVES if call.capability >= (8, 0) else (torch.float16,)
    if dtype not in (*halves, torch.float32) or call.query.shape[-1] != call.key.shape[-1]:
        return False
    aligned = _alignment(dtype, call.capability)
    if any(tensor.shape[-1] % aligned for tensor in (call.query, call.value)):
        return False
    return _dense(call, grouped=RECENT)


def _alignment(dtype: torch.dtype, capability: tuple[int, int]) -> int:
    """Return the number of which the last dimension must be a multiple (minimum_gemm_alignment)."""
    if dtype is torch.float32:
        return 4 if capability >= (8, 0) else 1
    return 8 if capability >= (7, 0) else 4


def _cudnn(call: AttentionCall) -> bool:
    if call.capability < (8, 0):
        return False
    sizes = (call.query.shape[-1], call.value.shape[-1])
    if not _sizes_suit_cudnn(call, sizes) or call.query.dtype not in HALVES:
        return False
    rows, columns = call.query.shape[-2], call.key.shape[-2]
    if columns == 1 or (rows == 1 and call.dropout > 0) or not _mask_suits_cudnn(call):
        return False
    if call.dropout * 16 % 1:  # cuDNN's dropout knows sixteenths (check_cudnn_dropout)
        return False
    deterministic = torch.are_deterministic_algorithms_enabled()
    return not (deterministic and not torch.is_deterministic_algorithms_warn_only_enabled()) and _dense(
        call, grouped=True
    )


def _sizes_suit_cudnn(call: AttentionCall, sizes: tuple[int, int]) -> bool:
    """Whether heads of queries and values have sizes that cuDNN takes (check_cudnn_tensor_shapes)."""
    if any(size % 8 for size in sizes):
        return False
    if max(sizes) <= CUDNN_DIM:
        return True
    hopper, blackwell = call.capability == (9, 0), call.capability[0] == 10
    if RECENT and (hopper or blackwell):
        return sizes in CUDNN_DIMS_LEARNING if call.needs_grad else max(sizes) <= CUDNN_DIM_HOPPER
    return (hopper and max(sizes) <= CUDNN_DIM_HOPPER) or (blackwell and sizes == CUDNN_DIMS_BLACKWELL)


def _mask_suits_cudnn(call: AttentionCall) -> bool:
    """Whether a mask needs no gradient and has a suitable shape (check_attn_mask_shape).

    The shape has four dimensions, or the last two, each of them full or 1.
    """
    mask = call.mask
    if mask is None:
        return True
    wanted = (*call.query.shape[:2], call.query.shape[-2], call.key.shape[-2])[-mask.dim() :]
    alike = all(size in (1, full) for size, full in zip(mask.shape, wanted, strict=False))
    return not mask.requires_grad and mask.dim() in (2, 4) and alike


_CAN = {"cudnn": _cudnn, "flash": _flash, "efficient": _efficient, "math": lambda call: True}


_MODULES = ("transformers.masking_utils", "transformers.modeling_attn_mask_utils")


class AttentionMasks(Correction):
    """Replaces `is_tracing` in the modules that make masks by one that does not look at the tensor."""

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Replace it in the modules that are imported now, and in others when a module first runs after."""
        missing = set(_MODULES)

        def replace(*_: object) -> None:
            for name in missing & sys.modules.keys():
                missing.discard(name)
                _replace(sys.modules[name], patches)

        replace()
        patches.on_undo(register_module_forward_pre_hook(replace).remove)


def _replace(module: Any, patches: Patches) -> None:
    original = getattr(module, "is_tracing", None)
    if original is not None:
        patches.set(module, "is_tracing", lambda tensor=None: original())
