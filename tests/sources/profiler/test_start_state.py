"""What was alive on a GPU before the window, by the blocks that its allocator lists."""

from __future__ import annotations

from tb_memplugin.sources.modules import ModuleNames
from tb_memplugin.sources.profiler.start_state import start_state
from tb_memplugin.sources.profiler.window import Window
from tb_memplugin.sources.storages import Sighting
from tb_memplugin.sources.tables import Names, Owners
from tb_memplugin.trace import Category
from tests.sources.profiler.test_beside_counters import events

WORKSPACE = 33_554_432


def state(blocks: list[tuple[int, int]], counted: int, start: list[Sighting] | None = None):
    """The start state of a device where one event follows: 512 bytes are allocated at address 0."""
    window = Window(0, 1, ModuleNames(), start=start or [])
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


def test_many_blocks_of_that_size_are_something_else():
    found, _ = state([(0x1000 * row, WORKSPACE) for row in range(1, 6)], 5 * WORKSPACE)
    assert set(found.category.tolist()) == {Category.UNKNOWN}


def test_what_the_counter_has_beside_the_blocks_is_a_row_of_its_own():
    found, _ = state([(0x1000, 512)], 2048)
    assert found.bytes.tolist() == [512, 1536]
    assert found.address.tolist() == [0x1000, 0]
