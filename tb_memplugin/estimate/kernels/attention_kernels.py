"""Find out which kernel `scaled_dot_product_attention` uses on a GPU.

The GPU decides the order (`GpuSpec.sdpa_order`), aten/src/ATen/native/transformers/cuda/sdp_utils.cpp
(can_use_flash_attention and similar functions) has the limits of each kernel, and the program chooses with
`torch.nn.attention.sdpa_kernel` which kernels are allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.gpu_spec import GpuSpec

FLASH_DIM, CUDNN_DIM, CUDNN_DIM_HOPPER = 256, 128, 256
CUDNN_DIMS_BLACKWELL = (192, 128)
"""Sizes of queries and values that cuDNN takes on Blackwell beside those up to `CUDNN_DIM`."""

CUDNN_DIMS_LEARNING = ((192, 128), (256, 256))
"""The same for a backward, on Hopper and Blackwell, since `RECENT` (check_cudnn_d256_bprop_head_dim)."""

RECENT = torch.torch_version.TorchVersion(torch.__version__) >= "2.14"
"""Whether the efficient kernel takes fewer key heads, and all fused kernels a single one without a flag."""
_HALVES = (torch.float16, torch.bfloat16)
SWITCHES = {"cudnn": "cudnn", "flash": "flash", "efficient": "mem_efficient", "math": "math"}
NUMBERS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
"""Values of torch.nn.attention.SDPBackend."""

USUAL_ORDERS = ([1, 2, 0, 3], [3, 1, 2, 0])
"""PyTorch's orders, if the program gives none: on most GPUs, and on those where it prefers cuDNN."""

DEFAULT_ORDER = ("flash", "efficient", "math")
"""The order if no particular GPU is given."""


@dataclass(frozen=True, slots=True)
class Call:
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


def kernel(call: Call) -> str:
    """Return the kernel for a call: "cudnn", "flash", "efficient" or "math".

    Raises:
        MemPluginError: none of the kernels that the program allows can run the call.
    """
    backends: Any = torch.backends.cuda
    allowed: dict[str, Any] = {
        name: getattr(backends, f"{switch}_sdp_enabled") for name, switch in SWITCHES.items()
    }
    for name in _order(call.gpu):
        can: Callable[[Call], bool] = _CAN[name]
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


def _dense(call: Call, *, grouped: bool) -> bool:
    tensors = (call.query, call.key, call.value)
    if any(tensor.dim() != 4 for tensor in tensors):
        return False
    heads = [tensor.shape[1] for tensor in tensors]
    same_batch = len({tensor.shape[0] for tensor in tensors}) == 1
    alike = len(set(heads)) == 1
    fewer = heads[1] == heads[2] and heads[0] % max(heads[1], 1) == 0
    allowed = (call.grouped and grouped) or (RECENT and heads[1] == 1)
    contiguous = all(tensor.stride(-1) == 1 or tensor.shape[-1] == 1 for tensor in tensors)
    not_empty = all(tensor.shape[-2] > 0 for tensor in tensors)
    return same_batch and (alike or (fewer and allowed)) and contiguous and not_empty


def _flash(call: Call) -> bool:
    sizes = {tensor.shape[-1] for tensor in (call.query, call.key, call.value)}
    size = max(sizes)
    if call.mask is not None or len(sizes) > 1 or size > FLASH_DIM or call.query.dtype not in _HALVES:
        return False
    small_shared_memory = call.capability in ((8, 6), (8, 9), (12, 0)) and call.needs_grad
    if small_shared_memory and (192 < size <= 224 or (size > 224 and call.dropout > 0)):
        return False
    if call.causal and call.query.shape[-2] != call.key.shape[-2]:
        return False
    return call.capability >= (8, 0) and _dense(call, grouped=True)


def _efficient(call: Call) -> bool:
    dtype = call.query.dtype
    halves = _HALVES if call.capability >= (8, 0) else (torch.float16,)
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


def _cudnn(call: Call) -> bool:
    if call.capability < (8, 0):
        return False
    sizes = (call.query.shape[-1], call.value.shape[-1])
    if not _sizes_suit_cudnn(call, sizes) or call.query.dtype not in _HALVES:
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


def _sizes_suit_cudnn(call: Call, sizes: tuple[int, int]) -> bool:
    """Whether heads of queries and values have sizes that cuDNN takes (check_cudnn_tensor_shapes)."""
    if any(size % 8 for size in sizes):
        return False
    if max(sizes) <= CUDNN_DIM:
        return True
    hopper, blackwell = call.capability == (9, 0), call.capability[0] == 10
    if RECENT and (hopper or blackwell):
        return sizes in CUDNN_DIMS_LEARNING if call.needs_grad else max(sizes) <= CUDNN_DIM_HOPPER
    return (hopper and max(sizes) <= CUDNN_DIM_HOPPER) or (blackwell and sizes == CUDNN_DIMS_BLACKWELL)


def _mask_suits_cudnn(call: Call) -> bool:
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
