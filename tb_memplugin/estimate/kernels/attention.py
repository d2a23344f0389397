"""Run `scaled_dot_product_attention` with the kernel that the target GPU would use, and what that allocates.

Fake tensors always use the math path, which materialises the scores: 57 MiB where flash attention takes 7.
The GPU decides the order of kernels (`GpuSpec.sdpa_order`), sdp_utils.cpp in
aten/src/ATen/native/transformers/cuda has the limits of each (can_use_flash_attention and similar functions),
and the program chooses with `torch.nn.attention.sdpa_kernel` which are allowed.

Flash attention accepts no mask. For fake tensors, transformers keeps every mask (`is_tracing`,
masking_utils.py); here it omits masks that mask nothing, as in a real run: values.py answers that nothing is
padded or packed, unless a hint says otherwise.

Flash attention and the efficient kernel are PyTorch's own. What cuDNN takes is two parts: what its frontend
wants is in its source (cudnn_frontend/node/scaled_dot_product_flash_attention.h): in backward, dQ in float32
and a sum for each row. What the kernel itself wants is not documented. The rule here was found on 2026-11-23
by running PyTorch's own code with cuDNN 9.20's answers for an A100, an H100 and a B200 (docs/estimate.md).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.modules.module import register_module_forward_pre_hook

from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.gpu_spec import GpuSpec
from tb_memplugin.estimate.kernels.table import HALVES, Buffers, Call, Kernel, Outliving, operators
from tb_memplugin.estimate.run.correction import Correction
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode, Rule
from tb_memplugin.estimate.run.patches import Patches

aten = torch.ops.aten

RECENT = torch.torch_version.TorchVersion(torch.__version__) >= "2.14"
"""Whether the efficient kernel takes fewer key heads, and all fused kernels a single one without a flag."""

HOPPER, BLACKWELL = (9, 0), (10, 0)
"""The first compute capabilities with kernels of their own."""

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


_MOST_SPLITS = 128
_KEPT_IN_REGISTERS = 128
"""Up to this head dimension, the efficient kernel's forward needs no buffer for its sums."""

_LARGE_SHARED = 160 << 10
"""Shared memory with which the largest blocks of the efficient kernel's backward fit."""

_BLOCKS_TO_FILL = 200
"""The number of blocks that the efficient kernel's backward aims at when it splits the keys."""

_TILE = 128
"""Queries and keys that a kernel computes together."""

_DEEP = (192, 128)
"""Sizes of queries and values that have a kernel of their own on Blackwell."""

_FEW_KEYS, _MOST_PARTS = 512, 64
"""So many keys are not divided into parts, and more into so many parts at the most."""

_HEADER, _UNIT = 256, 128


def _flash_buffers(call: Call) -> Buffers:
    """Return partial results where the keys are split, and the random state that dropout replaces."""
    out, sums, random, unused = (call.out[row] for row in (0, 1, 6, 7))
    splits = 1 if call["dropout_p"] else _splits(call["query"], call["key"], call.gpu)
    rows = 4 * splits * sums.numel()
    partial = [rows, rows * _wide(call["query"].shape[-1])] if splits > 1 else []
    last = [random.untyped_storage().nbytes(), unused, random] if call["dropout_p"] else [random, unused]
    return [out, sums, *partial, last]


def _splits(query: torch.Tensor, key: torch.Tensor, gpu: GpuSpec) -> int:
    """Return into how many parts flash attention splits the keys (num_splits_heuristic).

    It takes the fewest whose use of the processors is at least 85 % of the best.
    """
    batch, heads, length, size = query.shape
    if length == 1 and heads > key.shape[1]:  # query heads that share a key head become rows
        length, heads = heads // key.shape[1], key.shape[1]
    keys = -(-key.shape[2] // (256 if size <= 64 else 128 if size <= 128 else 64))
    blocks, slots = batch * heads * -(-length // 64), 2 * gpu.processors
    if blocks >= 0.8 * slots:
        return 1
    used = {}
    for count in range(1, min(_MOST_SPLITS, slots, keys) + 1):
        if count == 1 or -(-keys // count) != -(-keys // (count - 1)):
            waves = blocks * count / slots
            used[count] = waves / -(-blocks * count // slots)
    return next(count for count, share in used.items() if share >= 0.85 * max(used.values()))


def _flash_backward(call: Call) -> Buffers:
    """Return contiguous copies, softmax_d and dq_accum; with fewer key heads, dk and dv for all heads."""
    query, key = call["query"], call["key"]
    batch, heads, length, size = query.shape
    rows = 4 * batch * heads * _up(length, 128)
    sums = -(-call.gpu.processors // (batch * heads)) if _deterministic() else 1
    expanded = batch * key.shape[2] * heads * size * query.element_size() if key.shape[1] != heads else 0
    copies = [_transposed_copy(call[name]) for name in ("grad_out", "out")]
    return [*copies, *call.out, rows, sums * rows * _wide(size), expanded, expanded]


def _efficient_results(
    mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return the results, the random state on the CPU with dropout, and before PyTorch 2.14."""
    out, sums, *_ = mode.quietly(func, *args, **kwargs)
    if RECENT and not (args[5] if len(args) > 5 else kwargs.get("dropout_p", 0.0)):
        state = [mode.quietly(aten.new_empty.default, out, [], dtype=torch.int64) for _ in range(2)]
    else:
        with mode:
            state = [torch.empty((), dtype=torch.int64) for _ in range(2)]
    return out, sums, *state


def _efficient_buffers(call: Call) -> Buffers:
    """Return the buffer for sums of large heads."""
    query = call["query"]
    large = max(query.shape[-1], call["value"].shape[-1]) > _KEPT_IN_REGISTERS
    out, sums, *state = call.out
    return [*state, out, sums, 4 * out.numel() if large and query.element_size() < 4 else 0]


def _efficient_backward(call: Call) -> Buffers:
    """Return the copy of the gradient, delta (a sum for each row) and the workspace.

    With fewer key heads, also dk and dv for all heads.
    """
    gradient, query, key, value = (call[name] for name in ("grad_out_", "query", "key", "value"))
    rows = query.shape[:2].numel() * key.shape[2] * query.element_size()
    grouped = key.shape[1] != query.shape[1]
    expanded = [rows * tensor.shape[3] for tensor in (key, value)] if grouped else []
    blocks = _Blocks.of(call.gpu, query, value, dropout=bool(call["dropout_p"]))
    sums = 4 * query.shape[:3].numel()
    delta: list[Any] = [sums]
    if not blocks.computes_delta:
        alike = query.shape[1] == 1 or query.shape[2] == 1  # then no copy is needed to transpose the sums
        products = [4 * gradient.numel()] * (3 if query.element_size() < 4 else 1)
        delta = [[*products, 0 if alike else sums, Outliving(sums)]]
    workspace = blocks.workspace(query, key, value)
    return [_transposed_copy(gradient), *call.out, *expanded, *delta, workspace]


@dataclass(frozen=True, slots=True)
class _Blocks:
    """How the efficient kernel's backward divides its work: blocks of `rows` queries and `columns` keys.

    `in_registers`: the gradients of key and value need no workspace.
    """

    rows: int
    columns: int
    in_registers: bool
    computes_delta: bool

    @classmethod
    def of(cls, gpu: GpuSpec, query: torch.Tensor, value: torch.Tensor, *, dropout: bool) -> _Blocks:
        """Return the blocks of the first kernel that fits (mem_eff_attention/kernels/cutlassB.h)."""
        size, half = max(query.shape[-1], value.shape[-1]), query.element_size() < 4
        large, old = gpu.shared_bytes >= _LARGE_SHARED, gpu.compute_capability < (8, 0)
        if size <= 64:
            rows, columns, most = 64, 64, 64
        elif not half:
            rows, columns, most = (128 if large else 64), 64, 0
        elif size > 128:
            rows, columns, most = 128, 64, 0
        elif old or large:
            rows, columns, most = 128, 64 if old else 128, 128
        elif size <= 96 and not dropout and gpu.compute_capability in ((8, 6), (8, 9)):
            rows, columns, most = 128, 64, 96
        else:
            rows, columns, most = 64, 64, 0
        in_registers = half and bool(most)
        computes = half and (in_registers or gpu.compute_capability != (7, 0))
        return cls(rows, columns, in_registers or not half, computes)

    def workspace(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> int:
        """Return the bytes of the workspace: a tile and 16 bytes for each block of dQ, and dK and dV."""
        pairs = query.shape[:2].numel()
        tiles = -(-query.shape[2] // self.rows) * -(-query.shape[3] // self.columns)
        floats = tiles * (4 + self.rows * self.columns)
        if not self.in_registers:
            splits = max(min(-(-key.shape[2] // self.columns), _BLOCKS_TO_FILL // pairs), 1)
            splits = 1 if _deterministic() else splits
            sizes = (query.shape[3], value.shape[3])
            floats += splits * self.columns * sum(_up(size, self.rows) for size in sizes)
        return 4 * pairs * _up(floats, 4)


@dataclass(frozen=True, slots=True)
class CudnnAttention:
    """The numbers of one attention that decide on the workspaces of its kernels.

    Attributes:
        heads, key_heads: heads of queries, and of keys and values.
        queries, keys: lengths.
        size, value_size: of a head of queries and keys, and of values.
        causal, drops: whether there is a causal mask, and dropout.
        gpu: the target.
    """

    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    size: int
    value_size: int
    causal: bool
    drops: bool
    gpu: GpuSpec

    @classmethod
    def of(cls, call: Call) -> CudnnAttention:
        """Return those of a call. Query, key and value have shape (batch, heads, length, size)."""
        key, value = call["key"], call["value"]
        batch, heads, queries, size = call["query"].shape
        numbers = (batch, heads, key.shape[1], queries, key.shape[2], size, value.shape[3])
        return cls(*numbers, causal=call["is_causal"], drops=call["dropout_p"] > 0, gpu=call.gpu)

    def forward_bytes(self) -> int:
        """Return the workspace of the forward."""
        if self.gpu.compute_capability >= BLACKWELL:
            return self._dropped + _UNIT if self.drops else 0
        if self.queries == 1:
            return self._parts
        return _HEADER if self.gpu.compute_capability >= HOPPER else 0

    def backward_bytes(self) -> int:
        """Return the workspace of the backward."""
        rows = self.batch * self.heads * self.queries
        return 4 * rows * (self.size + 1) + self._of_the_backward_kernel

    @property
    def _of_the_backward_kernel(self) -> int:
        """The bytes besides dQ and the sums: dK and dV of all heads, and dQ again in some kernels."""
        whole_heads = 2 * self.batch * self.heads * self.keys * (self.size + self.value_size)
        grouped = whole_heads if self.key_heads != self.heads else 0
        again = 4 * self.batch * self.heads * _up(self.queries, 8) * self.size
        if self.gpu.compute_capability < HOPPER:
            return grouped + again + _UNIT
        if self.gpu.compute_capability < BLACKWELL:
            return grouped + _HEADER
        few = min(self.queries, self.keys) <= _TILE and (self.queries > 1 or self.batch == 1)
        usual = not few or self.drops or (self.size, self.value_size) == _DEEP
        own = grouped + self._dropped + (0 if usual else again)
        return own + _UNIT if own else 0

    @property
    def _parts(self) -> int:
        """The bytes of partial results and two numbers of each where one query has many keys."""
        if self.causal or self.keys <= _FEW_KEYS:
            return 0
        processors, blocks = self.gpu.processors, self.batch * self.key_heads
        filling = 1 << ((processors - 1) // blocks).bit_length()  # the first power of 2 that fills the GPU
        full = 1 << ((self.keys - 1) // (_TILE - 1)).bit_length() - 1  # the last that leaves a tile to each
        parts = min(filling, full, _MOST_PARTS)
        if parts == 1 or (parts == 2 and parts * blocks > processors):
            return 0
        rows = 4 * parts * self.batch * self.heads
        return _up(rows * self.value_size, _UNIT) + 2 * _up(rows, _UNIT) + _UNIT

    @property
    def _dropped(self) -> int:
        """The bytes of a bit for each score that dropout may drop, in whole tiles; 0 without dropout."""
        tiles = _up(self.queries, _TILE) * _up(self.keys, _TILE)
        return self.batch * self.heads * tiles // 8 if self.drops else 0


def _cudnn_results(
    mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return the results, without sums if no backward follows."""
    results: tuple[Any, ...] = mode.quietly(func, *args, **kwargs)
    if args[4]:
        return results
    none = mode.quietly(aten.new_empty.default, results[0], [0], dtype=torch.float32)
    return results[0], none, *results[2:]


def _cudnn_buffers(call: Call) -> Buffers:
    """Return the random state, the result, the sums of rows, and the workspace while it is alive."""
    out, sums, seed, offset = (call.out[row] for row in (0, 1, 6, 7))
    return [seed, offset, out, sums, CudnnAttention.of(call).forward_bytes()]


def _cudnn_backward(call: Call) -> Buffers:
    """Return the copy of a gradient whose rows are not contiguous, and the workspace."""
    gradient = call["grad_out"]
    return [gradient.nbytes if gradient.stride(-1) != 1 else 0, CudnnAttention.of(call).backward_bytes()]


def _transposed_copy(tensor: torch.Tensor) -> int:
    """Return the bytes of a copy in the kernels' layout (batch, length, heads, size); 0 if there is none."""
    return 0 if tensor.transpose(1, 2).is_contiguous() else tensor.nbytes


def _deterministic() -> bool:
    """Whether kernels must be deterministic."""
    return torch.are_deterministic_algorithms_enabled()


def _wide(size: int) -> int:
    """Return the head dimension as flash attention rounds it."""
    return _up(size, 32 if size <= 128 else 64)


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


_FLASH, _EFFICIENT, _CUDNN = (
    f"_scaled_dot_product_{name}_attention" for name in ("flash", "efficient", "cudnn")
)

KERNELS = (
    Kernel(operators(_FLASH), _flash_buffers, source="transformers/cuda/flash_attn/flash_api.cpp:mha_fwd"),
    Kernel(
        operators(f"{_FLASH}_backward"),
        _flash_backward,
        source="transformers/cuda/flash_attn/flash_api.cpp:mha_bwd",
    ),
    Kernel(
        operators(_EFFICIENT),
        _efficient_buffers,
        source="transformers/cuda/attention.cu:_efficient_attention_forward",
        results=_efficient_results,
    ),
    Kernel(
        operators(f"{_EFFICIENT}_backward"),
        _efficient_backward,
        source=(
            "transformers/cuda/attention_backward.cu:_efficient_attention_backward, "
            "transformers/cuda/mem_eff_attention/kernel_backward.h"
        ),
    ),
    Kernel(
        operators(_CUDNN), _cudnn_buffers, source="cudnn/MHA.cpp:run_cudnn_SDP_fprop", results=_cudnn_results
    ),
    Kernel(operators(f"{_CUDNN}_backward"), _cudnn_backward, source="cudnn/MHA.cpp:run_cudnn_SDP_bprop"),
)
