"""One rank of a world that is not there: torch's fake process group, whose collectives move nothing."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.patches import Patches

_KEPT = ("group_desc", "use_local_synchronization")
"""What `new_group` is told of a program's wishes; not the backend, nor its options."""


@contextmanager
def fake_group(rank: int, world_size: int) -> Iterator[None]:
    """Be a rank of a world, for this process alone, until the block ends.

    Raises:
        MemPluginError: PyTorch has no torch.distributed, or a process group exists already.
    """
    if not dist.is_available():
        raise MemPluginError(
            "Several ranks need torch.distributed, which this PyTorch is built without.",
            where="estimate_ranks",
            fix="Use a build with it, or estimate one rank with MemoryEstimator.",
        )
    if dist.is_initialized():
        raise MemPluginError(
            f"This process is rank {dist.get_rank()} of a process group already.",
            where="estimate_ranks",
            fix="Estimate in a process of its own, or call torch.distributed.destroy_process_group() before.",
        )
    from torch.testing._internal.distributed.fake_pg import FakeStore

    hook, patches = sys.excepthook, Patches()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        _forget_other_ranks()
        _stay_fake(patches)
        yield
    finally:
        patches.undo()
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.excepthook = hook  # it was given the rank's name
        _forget_other_ranks()


def _stay_fake(patches: Patches) -> None:
    """Let a program make groups of any backend, and join the world that it is in already."""
    original: Any = distributed_c10d.new_group

    @functools.wraps(original)
    def new_group(ranks: Any = None, *_: Any, **keywords: Any) -> Any:
        told = {name: keywords[name] for name in _KEPT if name in keywords}
        return original(ranks, **told)

    for owner in (dist, distributed_c10d):
        patches.set(owner, "new_group", new_group)
        patches.set(owner, "init_process_group", _nothing)


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _forget_other_ranks() -> None:
    """DTensor remembers how operators are sharded, with the rank's own coordinates."""
    from torch.distributed.tensor import DTensor, _random

    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache_clear()
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear is not None:
        clear()
    _random._rng_tracker = None
