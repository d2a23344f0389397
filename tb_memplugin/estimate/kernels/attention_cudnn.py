"""What cuDNN's kernels of `scaled_dot_product_attention` allocate besides their results: workspaces.

Two parts add up. What cuDNN's frontend wants is in its source (cudnn_frontend/node/
scaled_dot_product_flash_attention.h): in backward, dQ in float32 and a sum for each row. What the kernel
itself wants is not documented. The rule here was found on 2026-11-23 by running PyTorch's own code with
cuDNN 9.20's answers for an A100, an H100 and a B200 (docs/estimate.md).

When it is alive: run_cudnn_SDP_fprop and run_cudnn_SDP_bprop in aten/src/ATen/native/cudnn/MHA.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tb_memplugin.estimate.gpu_spec import GpuSpec
from tb_memplugin.estimate.kernels.reductions import ANY_GPU
from tb_memplugin.estimate.run.fake_mode import CountingFakeMode, Rule

aten = torch.ops.aten

HOPPER, BLACKWELL = (9, 0), (10, 0)
"""The first compute capabilities with kernels of their own."""

_TILE = 128
"""Queries and keys that a kernel computes together."""

_DEEP = (192, 128)
"""Sizes of queries and values that have a kernel of their own on Blackwell."""

_FEW_KEYS, _MOST_PARTS = 512, 64
"""So many keys are not divided into parts, and more into so many parts at the most."""

_HEADER, _UNIT = 256, 128


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
    def of(
        cls, tensors: Sequence[torch.Tensor], dropout: float, causal: bool, gpu: GpuSpec
    ) -> CudnnAttention:
        """Return those of a call. The tensors are query, key and value: (batch, heads, length, size)."""
        query, key, value = tensors
        batch, heads, queries, size = query.shape
        numbers = (batch, heads, key.shape[1], queries, key.shape[2], size, value.shape[3])
        return cls(*numbers, causal=causal, drops=dropout > 0, gpu=gpu)

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


def cudnn_rules(gpu: GpuSpec | None) -> dict[Any, Rule]:
    """Return rules for cuDNN's operators, forward and backward, on a GPU."""
    workspaces = _Workspaces(gpu or ANY_GPU)
    return {
        aten._scaled_dot_product_cudnn_attention.default: workspaces.forward,
        aten._scaled_dot_product_cudnn_attention_backward.default: workspaces.backward,
    }


@dataclass(frozen=True, slots=True)
class _Workspaces:
    gpu: GpuSpec

    def forward(self, mode: CountingFakeMode, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Record the random state, the result, the sums of rows, and the workspace while it is alive."""
        results = mode.quietly(func, *args, **kwargs)
        if not args[4]:  # no backward follows, so there are no sums
            none = mode.quietly(aten.new_empty.default, results[0], [0], dtype=torch.float32)
            results = (results[0], none, *results[2:])
        out, sums, seed, offset = results[0], results[1], results[6], results[7]
        mode.see((seed, offset, out, sums), func)
        dropout = args[5] if len(args) > 5 else kwargs.get("dropout_p", 0.0)
        causal = args[6] if len(args) > 6 else kwargs.get("is_causal", False)
        call = CudnnAttention.of(args[:3], dropout, causal, self.gpu)
        mode.passing(
            [call.forward_bytes()], func, mode.layers.scope(), mode.ledger.device_row(out.fake_device)
        )
        return results

    def backward(self, mode: CountingFakeMode, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Record the results, the copy of a gradient whose rows are not contiguous, and the workspace."""
        results = mode.quietly(func, *args, **kwargs)
        mode.see(results, func)
        gradient = args[0]
        copied = gradient.numel() * gradient.element_size() if gradient.stride(-1) != 1 else 0
        call = CudnnAttention.of(args[1:4], args[13], args[14], self.gpu)
        row = mode.ledger.device_row(gradient.fake_device)
        mode.passing([copied, call.backward_bytes()], func, mode.layers.scope(), row)
        return results


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
