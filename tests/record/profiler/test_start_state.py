"""What was alive on a GPU before the window, by the blocks that its allocator lists."""

from __future__ import annotations

import numpy as np
import pytest

from tb_memplugin.read import cublas
from tb_memplugin.read.tables import Names, Owners
from tb_memplugin.record.modules import ModuleNames
from tb_memplugin.record.profiler.start_state import start_state
from tb_memplugin.record.profiler.window import Window
from tb_memplugin.record.provenance import with_later_names
from tb_memplugin.record.storages import Sighting
from tb_memplugin.trace import Category
from tests.record.profiler.test_beside_counters import events

WORKSPACE = 33_554_432
LT = 1_048_576


def state(
    blocks: list[tuple[int, int]],
    counted: int,
    start: list[Sighting] | None = None,
    buckets: list[tuple[int, int]] | None = None,
):
    """The start state of a device where one event follows: 512 bytes are allocated at address 0."""
    window = Window(0, 1, ModuleNames(), start=start or [], buckets=buckets or [])
    window.blocks = [("cuda:0", address, size) for address, size in blocks]
    memory = events("cuda:0", (512, counted + 512))
    return start_state(window, memory, memory.devices, Owners([]), Names())


def test_blocks_of_a_workspaces_size_that_nobody_holds_are_workspaces():
    found, notes = state([(0x1000, WORKSPACE), (0x2000, 512)], WORKSPACE + 512)
    assert found.category.tolist() == [Category.WORKSPACE, Category.UNKNOWN]
    assert notes == []


def test_a_parameter_of_that_size_is_a_parameter():
    weight = Sighting(0, "cuda:0", 0x1000, WORKSPACE, Category.PARAMETER, -1, "weight")
    found, _ = state([(0x1000, WORKSPACE), (0x2000, WORKSPACE)], 2 * WORKSPACE, [weight])
    assert found.category.tolist() == [Category.PARAMETER, Category.WORKSPACE]


def test_blocks_of_the_sizes_of_buckets_are_communication_of_their_module():
    """1,000 bytes take a block of 1,024; behind 2,000,000 the allocator may leave up to 1 MiB unused."""
    sizes = [1024, 2_500_096, 512, 3_500_032]
    blocks = [(0x1000 * row, size) for row, size in enumerate(sizes, 1)]
    found, _ = state(blocks, sum(sizes), buckets=[(7, 1000), (7, 2_000_000)])
    wanted = [Category.COMMUNICATION, Category.COMMUNICATION, Category.UNKNOWN, Category.UNKNOWN]
    assert found.category.tolist() == wanted
    assert found.module[:2].tolist() == [7, 7]


def test_more_blocks_of_a_buckets_size_than_buckets_are_something_else():
    found, _ = state([(0x1000, 1024), (0x2000, 1024)], 2048, buckets=[(7, 1000)])
    assert set(found.category.tolist()) == {Category.UNKNOWN}


def test_blocks_that_are_seen_in_use_only_later_have_their_names_then():
    """The second sighting's block was born in the window: its row is behind those of the start state."""
    labels, owners = Names(), Owners([])
    found, _ = state([(0x1000, WORKSPACE), (0x2000, 512), (0x3000, 512)], WORKSPACE + 1024)
    seen = [Sighting(9, "cuda:0", 0, 0, Category.OPTIMIZER_STATE, 7, name) for name in ("a", "b", "c", "d")]
    later = with_later_names(found, np.array([1, 3, -1, 0]), seen, owners, labels)
    state_, unknown = Category.OPTIMIZER_STATE, Category.UNKNOWN
    assert later.category.tolist() == [state_, state_, unknown]
    assert later.module[:2].tolist() == [7, 7]
    assert [labels.as_tuple()[row] for row in later.label[:2]] == ["d", "a"]
    assert with_later_names(found, np.array([3, -1]), seen[:2], owners, labels) is found


def test_a_later_use_does_not_rename_a_parameter():
    weight = Sighting(0, "cuda:0", 0x1000, 512, Category.PARAMETER, -1, "weight")
    found, _ = state([(0x1000, 512)], 512, [weight])
    other = Sighting(9, "cuda:0", 0x1000, 512, Category.GRADIENT, -1, "other")
    assert with_later_names(found, np.array([0]), [other], Owners([]), Names()) is found


def test_many_blocks_of_that_size_are_something_else():
    found, _ = state([(0x1000 * row, WORKSPACE) for row in range(1, 10)], 9 * WORKSPACE)
    assert set(found.category.tolist()) == {Category.UNKNOWN}


@pytest.mark.parametrize("size", [WORKSPACE, 8_519_680])
def test_two_threads_have_one_for_each_stream_of_a_cuda_graphs_capture(size):
    found, _ = state([(0x1000 * row, size) for row in range(1, 7)], 6 * size)
    assert set(found.category.tolist()) == {Category.WORKSPACE}


@pytest.mark.parametrize(("version", "cublaslt"), [((2, 8), 0), ((2, 9), 1), ((2, 11), 1), ((2, 12), 0)])
def test_versions_that_keep_one_of_cublaslt_have_at_most_as_many_as_of_cublas(version, cublaslt, monkeypatch):
    monkeypatch.setattr(cublas, "_torch_version", lambda: version)
    found, _ = state([(0x1000, WORKSPACE), (0x2000, LT)], WORKSPACE + LT)
    assert np.count_nonzero(found.category == Category.WORKSPACE) == 1 + cublaslt
    found, _ = state([(0x1000, WORKSPACE), (0x2000, LT), (0x3000, LT)], WORKSPACE + 2 * LT)
    assert np.count_nonzero(found.category == Category.WORKSPACE) == 1


def test_what_the_counter_has_beside_the_blocks_is_a_row_of_its_own():
    found, _ = state([(0x1000, 512)], 2048)
    assert found.bytes.tolist() == [512, 1536]
    assert found.address.tolist() == [0x1000, 0]


def test_an_allocator_that_tells_nothing_has_what_models_held_and_no_contradiction():
    weight = Sighting(0, "cuda:0", 0x1000, 400, Category.PARAMETER, -1, "weight")
    window = Window(0, 1, ModuleNames(), start=[weight])
    found, notes = start_state(window, events("cpu", (512, 512)), ("cpu", "cuda:0"), Owners([]), Names())
    assert found.bytes.tolist() == [400]
    assert notes == []


def test_a_batch_in_shared_memory_from_before_the_window_is_input():
    memory = events("shared", (-512, 0))
    found, _ = start_state(Window(0, 1, ModuleNames()), memory, memory.devices, Owners([]), Names())
    assert found.bytes.tolist() == [512]
    assert found.category.tolist() == [Category.INPUT]
