"""The segments before the first entry, against a replay of single addresses."""

from __future__ import annotations

from random import Random

import pytest

from tb_memplugin.read.snapshot.trace import trace_from_snapshot
from tb_memplugin.trace import MemoryTrace
from tests.snapshots import block, entries, segment, snapshot

GRAIN = 512


def history(random: Random, length: int = 30) -> tuple[list[str], dict[int, int], set[int]]:
    """Entries that take and give back stretches of 8 cells, the cells held at the end, and at the start."""
    held = {cell for cell in range(8) if random.random() < 0.5}
    first = set(held)
    lines = []
    for _ in range(length):
        begin = random.randrange(8)
        end = begin + 1
        free = begin not in held
        while end < 8 and (end not in held) == free and random.random() < 0.6:
            end += 1
        cells = range(begin, end)
        held = held | set(cells) if free else held - set(cells)
        lines.append(f"segment_{'map' if free else 'unmap'} {GRAIN * begin} {GRAIN * (end - begin)}")
    return lines, {GRAIN * cell: GRAIN for cell in held}, first


def cells_of(trace: MemoryTrace) -> set[int]:
    found = trace.segments
    return {
        address // GRAIN + cell
        for address, size in zip(found.address.tolist(), found.bytes.tolist(), strict=True)
        for cell in range(size // GRAIN)
    }


def loaded(lines: list[str], final: dict[int, int]) -> MemoryTrace:
    segments = [{**segment(total=size), "address": address} for address, size in final.items()]
    return trace_from_snapshot(snapshot(segments, entries(*lines)), "x")


@pytest.mark.parametrize("seed", range(20))
def test_what_was_reserved_at_first_is_what_the_entries_and_the_end_leave_open(seed: int) -> None:
    lines, final, first = history(Random(seed))
    trace = loaded(lines, final)
    assert cells_of(trace) == first
    assert not any("final segments differ" in note for note in trace.notes)


def test_a_block_without_an_address_follows_the_one_before_it_in_its_segment() -> None:
    blocks = [block(0, 5), block(2048, 6), block(0, 7, size=1024), block(0, 8)]
    for row in (0, 2, 3):
        del blocks[row]["address"]
    other = {**segment(block(8192, 9)), "address": 8192}
    del other["blocks"][0]["address"]
    whole = {**segment(*blocks), "total_size": 3096, "active_size": 2560}
    trace = trace_from_snapshot([whole, other], "x")
    assert trace.start.address.tolist() == [1000, 2048, 2560, 3584, 8192]
    assert trace.start.bytes.tolist() == [5, 6, 7, 8, 9]
    gap = "1 segments are not completely filled by their blocks (536 bytes)."  # from 1512 to 2048
    assert any(gap in note for note in trace.notes)


def test_a_range_that_was_not_cut_is_one_row_and_neighbours_are_not_joined() -> None:
    trace = loaded(["segment_map 1024 512", "segment_free 4096 1024"], {0: 1024, 1024: 512, 1536: 512})
    rows = zip(trace.segments.address.tolist(), trace.segments.bytes.tolist(), strict=True)
    assert list(rows) == [(0, 1024), (1536, 512), (4096, 1024)]


@pytest.mark.parametrize(
    ("lines", "final", "told"),
    [
        (["segment_alloc 0 1024"], {}, "1,024 bytes"),
        (["segment_alloc 0 1024", "segment_alloc 512 1024"], {0: 1536}, "512 bytes"),
        (["segment_free 0 1024"], {512: 1024}, "512 bytes"),
        ([], {0: 1024, 512: 1024}, "512 bytes"),
    ],
)
def test_bytes_that_contradict_each_other_are_told(
    lines: list[str], final: dict[int, int], told: str
) -> None:
    notes = [note for note in loaded(lines, final).notes if "final segments differ" in note]
    assert [told in note for note in notes] == [True]
