"""Collectives: which memory belongs to communication, and how long works keep what was sent or reduced.

A work keeps its tensors as long as it lives. If the program waits on its future alone, and not on the work,
NCCL keeps them longer: a thread notices that the work is complete, and the next call of the group lets them
go (ProcessGroupNCCL.cpp: stashed_for_allocator_safety_, shelvesToUnstash_, workEnqueue).

The copies of FSDP2 between gathered memory and parameters get one tensor of int64 with an address for each
parameter, its size, and the number of the parameter that each block of threads copies. It is freed at once.
Gradients in a dtype for which there is no kernel are padded first. Source: TensorShape.cu
(split_with_sizes_copy_out_cuda_contiguous_no_cast and get_chunk_cat_metadata; pack_vecs packs the numbers),
TensorShape.cpp (_pad_chunk).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from tb_memplugin.estimate.gpu_spec import GpuSpec
from tb_memplugin.estimate.libraries.plugins.distributed import Done
from tb_memplugin.estimate.run.correction import Correction
from tb_memplugin.estimate.run.fake_ledger import Scope
from tb_memplugin.estimate.run.fake_mode import After, CountingFakeMode, Rule
from tb_memplugin.trace import Category


class Communication(Correction):
    """Corrects functional collectives and copies of FSDP2, and categorises the buffers of FSDP2."""

    def rules(self) -> dict[Any, Rule]:
        """Return rules for FSDP2's copies, and one for `wait_tensor`, which returns its input.

        torch's fake `wait_tensor` allocates a new tensor.
        """
        if not dist.is_available():
            return {}
        rules: dict[Any, Rule] = {torch.ops._c10d_functional.wait_tensor.default: _the_same}
        if dist.is_initialized() and self.target.device_type == "cuda":
            rules |= shard_copy_rules(self.target.gpu)
        return rules

    def after(self) -> dict[Any, After]:
        """Return functions that categorise FSDP2's gather and reduce buffers and received tensors."""
        if not (dist.is_available() and dist.is_initialized()):
            return {}
        import torch.distributed.fsdp  # the import defines its operators

        named = {
            torch.ops.fsdp.all_gather_copy_in.default: _gathered,
            torch.ops.c10d._reduce_scatter_base_.default: _reduced_from,
            torch.ops.c10d.recv_.default: _received,
        }
        return named | {operator: _with_values_of_others(named.get(operator)) for operator in _collectives()}


def _the_same(
    mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> torch.Tensor:
    tensor: torch.Tensor = args[0] if args else kwargs["tensor"]
    return tensor


def _collectives() -> Iterator[Any]:
    for name in torch._C._dispatch_get_all_op_names():
        space, _, rest = name.partition("::")
        if space in ("c10d", "_c10d_functional"):
            packet, _, overload = rest.partition(".")
            yield getattr(getattr(getattr(torch.ops, space), packet), overload or "default")


def _with_values_of_others(after: After | None) -> After:
    """Make tensors with known values (constants.py) forget them: they have values of other ranks now."""

    def forget(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope) -> None:
        for tensor in tree_leaves((args, out)):
            if isinstance(tensor, FakeTensor) and tensor.constant is not None:
                mode.fake_tensor_converter.invalidate_constant_aliases(tensor.constant)
                tensor.constant = None
        if after is not None:
            after(mode, func, args, out, scope)

    return forget


def _gathered(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope) -> None:
    _name(mode, out[1])


def _reduced_from(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope) -> None:
    _name(mode, args[1])


def _received(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], out: Any, scope: Scope) -> None:
    for tensor in args[0]:
        _name(mode, tensor)


def _name(mode: CountingFakeMode, tensor: torch.Tensor) -> None:
    block = mode.ledger.block_of(tensor.untyped_storage())
    if block is not None and block.category is Category.UNKNOWN:
        block.category = Category.COMMUNICATION


Watcher = Callable[[list[torch.Tensor]], None]
"""Called with what NCCL stashes for a work that begins; `Work.wait` empties the list."""

_watching: list[Watcher] = []


class Underway(Done):
    """The work of a send, receive or all-reduce."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors, self._stashed = list(tensors), list(tensors)
        for watcher in _watching:
            watcher(self._stashed)

    def wait(self, *_: object, **__: object) -> bool:
        """Let NCCL's stash go."""
        self._stashed.clear()
        return True

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        """Return a finished future with the tensors as its result."""
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self._tensors)
        return future


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Call `watcher` for each work that begins inside the block."""
    _watching.append(watcher)
    try:
        yield
    finally:
        _watching.remove(watcher)


_BLOCK = 128
"""Threads of a block (BLOCK_SIZE)."""

_TILE = 16 * _BLOCK
"""Bytes that a block copies at once (TILE_SIZE)."""

_NUMBER = 8

_CATS = ("chunk_cat", "chunk_cat_mixed_dtype")
"""The operators that copy gradients together: until 2.14, and since 2.15 (one kernel for each dtype)."""


def shard_copy_rules(gpu: GpuSpec | None) -> dict[Any, Rule]:
    """Return a rule for each of the two operators. Without a GPU's name, an A100 is assumed."""
    importlib.import_module("torch.distributed.fsdp")  # the import defines them
    gpu = gpu or GpuSpec.named("a100")
    most_blocks = 2 * gpu.processors * gpu.threads // _BLOCK

    def split(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        gathered, sizes = args[:2]
        mode.quietly(func, *args, **kwargs)
        element = gathered.element_size()
        numbers = _split_numbers([size * element for size in sizes], gathered.shape[0], most_blocks)
        mode.passing([_NUMBER * numbers], func, mode.layers.scope())

    def cat(mode: CountingFakeMode, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        gradients, _, ranks = args[:3]
        mode.quietly(func, *args, **kwargs)
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
            alike = [gradient for gradient in gradients if gradient.dtype == dtype]
            mode.passing(_cat_buffers(alike, ranks, kwargs["out"]), func, mode.layers.scope())

    operators = torch.ops.fsdp
    cats = [getattr(operators, name) for name in _CATS if hasattr(operators, name)]
    return {operators.split_with_sizes_copy.default: split, **{packet.default: cat for packet in cats}}


def _split_numbers(shards: Sequence[int], ranks: int, most_blocks: int) -> int:
    """Return how many numbers the kernel needs that copies gathered shards (bytes each) to parameters."""
    blocks = sum(-(-size // _TILE) for size in shards)
    more = -(-blocks * ranks // most_blocks)  # how much more each thread has to copy
    rounds = -(-more // min(math.ceil(math.sqrt(more)), ranks))
    return 4 * len(shards) + 1 + sum(-(-size // (_TILE * rounds)) for size in shards)


def _cat_buffers(gradients: Sequence[torch.Tensor], ranks: int, out: torch.Tensor) -> list[int]:
    """Return the bytes that gradients need while they are copied together: numbers, or padded copies."""
    rows = [-(-gradient.shape[0] // ranks) for gradient in gradients]  # of each rank, the last one's padded
    if not _has_kernel(gradients[0].dtype, out.dtype):
        both = zip(gradients, rows, strict=True)
        return [
            ranks * n * _row(gradient) * gradient.element_size()
            for gradient, n in both
            if gradient.shape[0] % ranks
        ]
    parts = [n * _row(gradient) * out.element_size() for gradient, n in zip(gradients, rows, strict=True)]
    return [_NUMBER * (6 * len(parts) + 2 + sum(-(-size // _TILE) for size in parts))]


def _row(gradient: torch.Tensor) -> int:
    return math.prod(gradient.shape[1:])


def _has_kernel(source: torch.dtype, target: torch.dtype) -> bool:
    return source == target or (source, target) == (torch.bfloat16, torch.float32)
