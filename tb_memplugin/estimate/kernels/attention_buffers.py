"""What the kernels of `scaled_dot_product_attention` allocate besides their results, in bytes.

Flash attention and the efficient kernel are PyTorch's own. What cuDNN takes is two parts: what its frontend
wants is in its source (cudnn_frontend/node/scaled_dot_product_flash_attention.h): in backward, dQ in float32
and a sum for each row. What the kernel itself wants is not documented. The rule here was found on 2026-11-23
by running PyTorch's own code with cuDNN 9.20's answers for an A100, an H100 and a B200 (docs/estimate.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tb_memplugin.estimate.gpu_spec import GpuSpec
from tb_memplugin.estimate.kernels.table import Buffers, Call, Kernel, Outliving, operators
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode

aten = torch.ops.aten

RECENT = torch.torch_version.TorchVersion(torch.__version__) >= "2.14"
"""Whether the efficient kernel takes fewer key heads, and all fused kernels a single one without a flag."""

_MOST_SPLITS = 128
_KEPT_IN_REGISTERS = 128
"""Up to this head dimension, the efficient kernel's forward needs no buffer for its sums."""

_LARGE_SHARED = 160 << 10
"""Shared memory with which the largest blocks of the efficient kernel's backward fit."""

_BLOCKS_TO_FILL = 200
"""The number of blocks that the efficient kernel's backward aims at when it splits the keys."""

HOPPER, BLACKWELL = (9, 0), (10, 0)
"""The first compute capabilities with kernels of their own."""

_TILE = 128
"""Queries and keys that a kernel computes together."""

_DEEP = (192, 128)
"""Sizes of queries and values that have a kernel of their own on Blackwell."""

_FEW_KEYS, _MOST_PARTS = 512, 64
"""So many keys are not divided into parts, and more into so many parts at the most."""

_HEADER, _UNIT = 256, 128


def _flash(call: Call) -> Buffers:
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


def _efficient(call: Call) -> Buffers:
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


def _cudnn(call: Call) -> Buffers:
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
    Kernel(operators(_FLASH), _flash, source="transformers/cuda/flash_attn/flash_api.cpp:mha_fwd"),
    Kernel(
        operators(f"{_FLASH}_backward"),
        _flash_backward,
        source="transformers/cuda/flash_attn/flash_api.cpp:mha_bwd",
    ),
    Kernel(
        operators(_EFFICIENT),
        _efficient,
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
    Kernel(operators(_CUDNN), _cudnn, source="cudnn/MHA.cpp:run_cudnn_SDP_fprop", results=_cudnn_results),
    Kernel(operators(f"{_CUDNN}_backward"), _cudnn_backward, source="cudnn/MHA.cpp:run_cudnn_SDP_bprop"),
)
