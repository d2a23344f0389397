"""Run `scaled_dot_product_attention` with the kernel that the target GPU would use.

Fake tensors always use the math path, which materialises the scores: 57 MiB where flash attention takes 7.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from tb_memplugin.estimate.kernels.attention_buffers import buffer_rules
from tb_memplugin.estimate.kernels.attention_cudnn import BLACKWELL, cudnn_rules
from tb_memplugin.estimate.kernels.attention_kernels import Call, kernel
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


class Attention(Correction):
    """Calls the kernel's own operator, for which PyTorch has a fake implementation and a derivative."""

    def apply(self, mode: CountingFakeMode, patches: Patches) -> None:
        """Register `attend` for CUDA tensors, below autocast and above autograd's formulas."""
        self._mode = mode
        patches.register("scaled_dot_product_attention", self.attend, "AutogradCUDA")

    def rules(self) -> dict[Any, Rule]:
        """Return rules for the kernels, and for the whole operator, which inference mode does not divide."""
        return {
            aten.scaled_dot_product_attention.default: self._undivided,
            **buffer_rules(self.target.gpu),
            **cudnn_rules(self.target.gpu),
        }

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
        call = Call(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, self.target.gpu)
        chosen = kernel(call)
        if chosen == "flash":
            return _flash(call, scale)
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
        with mode.looking():
            return self.attend(*args, **kwargs)


def _flash(call: Call, scale: float | None) -> Any:
    size = call.query.shape[-1]
    extra = -size % _FLASH_STEP
    tensors = [call.query, call.key, call.value]
    if extra:
        tensors = [F.pad(tensor, (0, extra)) for tensor in tensors]
        scale = scale if scale is not None else size**-0.5
    out = aten._scaled_dot_product_flash_attention(*tensors, call.dropout, call.causal, False, scale=scale)[0]
    return out[..., :size] if extra else out


def _as_bias(call: Call) -> torch.Tensor | None:
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
