"""Collectives: which memory belongs to communication, and how long works keep what was sent or reduced.

A work keeps its tensors as long as it lives. If the program waits on its future alone, and not on the work,
NCCL keeps them longer: a thread notices that the work is complete, and the next call of the group lets them
go (ProcessGroupNCCL.cpp: stashed_for_allocator_safety_, shelvesToUnstash_, workEnqueue).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from tb_memplugin.estimate.libraries.plugins.distributed import Done
from tb_memplugin.estimate.program import shard_copies
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
            rules |= shard_copies.rules(self.target.gpu)
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
