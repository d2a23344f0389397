"""Tests that plugins apply while an estimate runs, and are undone after it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from tb_memplugin import MemoryEstimator
from tb_memplugin.estimate.libraries.plugins import PLUGINS, Plugin, replaced
from tb_memplugin.estimate.libraries.plugins.megatron import Megatron
from tb_memplugin.estimate.libraries.plugins.transformer_engine import TransformerEngine


class Doubling:
    """A plugin for a library with one function."""

    name = "library"

    def __init__(self, library: ModuleType) -> None:
        self.library = library

    def applies(self) -> bool:
        return "library" in sys.modules

    @contextmanager
    def patch(self) -> Iterator[None]:
        with replaced((self.library, "launch", lambda tensor: tensor.new_empty(2 * tensor.numel()))):
            yield


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType("library")
    made.launch = lambda tensor: tensor  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "library", made)
    return made


def test_a_plugin_of_your_own_works_while_the_estimate_runs(library: ModuleType) -> None:
    plugin = Doubling(library)
    before = library.launch
    PLUGINS.append(plugin)
    try:
        with MemoryEstimator(device="cpu") as estimator:
            assert library.launch(torch.empty(1024)).numel() == 2048
            assert estimator.get_max_memory_allocated() == (3 * 4096,)
        assert library.launch is before
    finally:
        PLUGINS.remove(plugin)


def test_a_plugin_is_left_also_when_the_estimate_fails(library: ModuleType) -> None:
    plugin = Doubling(library)
    before = library.launch
    PLUGINS.append(plugin)
    try:
        with pytest.raises(ZeroDivisionError), MemoryEstimator(device="cpu"):
            1 / 0  # noqa: B018
        assert library.launch is before
    finally:
        PLUGINS.remove(plugin)


def test_plugins_of_libraries_that_are_absent_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("megatron.core", "transformer_engine.pytorch"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert not Megatron().applies()
    assert not TransformerEngine().applies()
    assert all(isinstance(plugin, Plugin) for plugin in PLUGINS)


def test_collectives_need_no_process_group() -> None:
    before = (dist.all_reduce, dist.get_rank, dist.P2POp)
    with MemoryEstimator(device="cpu") as estimator:
        mine, theirs = torch.empty(1024), torch.empty(1024)
        assert (dist.get_rank(), dist.get_world_size(), dist.new_group().size()) == (0, 1, 1)
        assert dist.all_reduce(mine) is None
        assert dist.all_reduce(mine, async_op=True).wait()
        dist.all_gather_into_tensor(theirs, mine)
        dist.reduce_scatter_tensor(theirs, mine)
        dist.broadcast(mine, src=0)
        dist.barrier()
        dist.send(mine, dst=0)
        assert dist.recv(theirs, src=0) == 0
        sends = [dist.P2POp(dist.isend, mine, 0), dist.P2POp(dist.irecv, theirs, 0)]
        assert [work.wait() for work in dist.batch_isend_irecv(sends)] == [True, True]
        assert estimator.get_max_memory_allocated() == (2 * 4096,)  # only what the program allocated
    assert before == (dist.all_reduce, dist.get_rank, dist.P2POp)


def test_a_process_group_that_is_made_inside_is_torchs_own() -> None:
    with MemoryEstimator(device="cpu"):
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        try:
            assert dist.get_backend() == "gloo"
        finally:
            dist.destroy_process_group()
