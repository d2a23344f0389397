"""Frees of GPU memory between operators are not in the profiler's tree: they come from its flat list."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest

from tb_memplugin.record.profiler.memory_events import MemoryEvents, beside_counters, with_events_outside
from tb_memplugin.record.storages import Sighting
from tb_memplugin.trace import Category
from tests.record.profiler.test_beside_counters import events


@dataclass
class Flat:
    """What `kineto_results.events()` tells of an alloc or free on cuda:0."""

    time: int
    size: int
    title: str = "[memory]"

    def name(self) -> str:
        return self.title

    def start_ns(self) -> int:
        return self.time

    def nbytes(self) -> int:
        return self.size

    def device_index(self) -> int:
        return 0

    def device_type(self) -> SimpleNamespace:
        return SimpleNamespace(name="CUDA")

    def start_thread_id(self) -> int:
        return 1


class Undecodable(Flat):
    def name(self) -> str:
        raise UnicodeDecodeError("utf-8", b"\xb0", 0, 1, "as a Python call's name may be")


def tree(*told: tuple[int, int, int, int]) -> MemoryEvents:
    """Events of cuda:0 from (time, address, signed bytes, the allocator's total after it)."""
    time, address, size, total = zip(*told, strict=True)
    known = events("cuda:0", *zip(size, total, strict=True))
    return replace(known, time_ns=np.array(time), address=np.array(address, np.uint64))


def whole(memory, *flat, blocks=(), seen=(), has_steps=False):
    told = [Flat(int(time), int(size)) for time, size in zip(memory.time_ns, memory.bytes, strict=True)]
    found = with_events_outside(
        memory,
        lambda: [*told, *flat],
        [("cuda:0", address, size) for address, size in blocks],
        seen,
        has_steps=has_steps,
    )
    return list(
        zip(
            found.time_ns.tolist(),
            found.address.tolist(),
            found.bytes.tolist(),
            found.total.tolist(),
            strict=True,
        )
    ), found


def test_a_free_has_the_block_whose_address_is_used_again_and_the_counter_agrees():
    memory = tree((0, 0xA000, 512, 512), (1, 0xB000, 512, 1024), (9, 0xA000, 512, 1024))
    rows, found = whole(memory, Flat(5, -512))
    assert rows == [
        (0, 0xA000, 512, 512),
        (1, 0xB000, 512, 1024),
        (5, 0xA000, -512, 512),
        (9, 0xA000, 512, 1024),
    ]
    assert beside_counters(memory) != []
    assert beside_counters(found) == []


def test_a_block_that_somebody_holds_afterwards_is_not_taken():
    memory = tree(
        (0, 0xA000, 512, 512), (1, 0xB000, 512, 1024), (8, 0xB000, 512, 1024), (9, 0xA000, 512, 1024)
    )
    gradient = Sighting(6, "cuda:0", 0xB000, 512, Category.GRADIENT, -1, "weight (gradient)")
    rows, _ = whole(memory, Flat(5, -512), Flat(7, -512), seen=[gradient])
    assert [row[:2] for row in rows if row[2] < 0] == [(5, 0xA000), (7, 0xB000)]


def test_a_block_that_the_tree_frees_later_is_not_taken():
    memory = tree((0, 0xA000, 512, 512), (1, 0xB000, 512, 1024), (9, 0xB000, -512, 0))
    rows, _ = whole(memory, Flat(5, -512))
    assert rows[2] == (5, 0xA000, -512, 512)


def test_of_blocks_that_are_never_used_again_it_is_the_youngest_that_nobody_holds():
    memory = tree((0, 0xA000, 512, 1536), (1, 0xB000, 512, 2048))
    gradient = Sighting(2, "cuda:0", 0xB000, 512, Category.GRADIENT, -1, "weight (gradient)")
    rows, _ = whole(memory, Flat(5, -512), Flat(6, -1024), blocks=[(0x1000, 1024)], seen=[gradient])
    assert rows[2:] == [(5, 0xA000, -512, 1536), (6, 0x1000, -1024, 512)]


def test_before_the_first_event_the_counter_is_counted_back():
    memory = tree((5, 0xA000, 512, 1024))
    rows, _ = whole(
        memory, Flat(1, -512), Flat(2, -1024), blocks=[(0x1000, 512), (0x2000, 1024), (0x3000, 512)]
    )
    assert [row[3] for row in rows] == [1536, 512, 1024]


def test_an_alloc_without_operator_is_freed_again():
    rows, _ = whole(tree((0, 0xA000, 512, 512)), Flat(3, 2048), Flat(4, -2048))
    assert rows[1][1] == rows[2][1] != 0xA000
    assert [row[3] for row in rows] == [512, 2560, 512]


def test_in_steps_without_a_gap_the_flat_list_is_not_asked():
    memory = tree((0, 0xA000, 512, 1024), (1, 0xB000, 512, 1536))
    blocks = [("cuda:0", 0x1000, 512)]
    found = with_events_outside(memory, lambda: pytest.fail("it was asked"), blocks, [], has_steps=True)
    assert found is memory


def test_what_is_freed_before_the_first_event_of_a_step_is_missed_too():
    memory = tree((5, 0xA000, 512, 1024))
    rows, _ = whole(memory, Flat(1, -512), blocks=[(0x1000, 512), (0x2000, 512)], has_steps=True)
    assert len(rows) == 2


def test_names_of_python_calls_are_not_asked_for():
    memory = tree((0, 0xA000, 512, 512))
    rows, _ = whole(memory, Undecodable(3, 0), Flat(4, -512))
    assert len(rows) == 2
