"""The index of lifetimes finds the blocks that a look at every block finds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tb_memplugin.trace import replay
from tb_memplugin.trace.indexes import NEAR, Lifetimes
from tests.traces import trace


def alive(born, freed, moments):
    """The block, and the first moment at which it is alive and the first at which it is no longer."""
    lives = enumerate(zip(born.tolist(), freed.tolist(), strict=True))
    at = [(row, [n for n, moment in enumerate(moments) if b < moment <= f]) for row, (b, f) in lives]
    return [(row, own[0], own[-1] + 1) for row, own in at if own]


def in_order(found):
    return sorted(zip(*(column.tolist() for column in found), strict=True))


def test_a_block_is_alive_from_the_moment_after_its_allocation_to_the_one_before_its_free():
    born, freed = np.array([-1, 0, 2 * NEAR]), np.array([1, 5 * NEAR, 3 * NEAR])
    index = Lifetimes(born, freed)
    found = [
        sorted(index.alive_at(np.array([moment])).rows.tolist())
        for moment in (0, 1, 2, 2 * NEAR, 2 * NEAR + 1, 5 * NEAR + 1)
    ]
    assert found == [[0], [0, 1], [1], [1], [1, 2], []]


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([3, 100, 3_000, 50_000]), st.integers(1, 40))
def test_the_index_finds_what_a_look_at_every_block_finds(seed, events, count):
    random = np.random.default_rng(seed)
    blocks = int(random.integers(1, 300))
    born = np.sort(random.integers(-1, events, blocks))
    lives = random.exponential(random.choice([2, 300, 20_000], blocks)).astype(np.int64)
    freed = np.minimum(born + random.integers(0, 2, blocks) + lives, events)  # some are never alive
    moments = np.sort(random.integers(0, events + 1, count))
    assert in_order(Lifetimes(born, freed).alive_at(moments)) == alive(born, freed, moments)


@pytest.mark.parametrize("indexed", [0, 1 << 40])
def test_blocks_of_one_device_are_found_with_and_without_the_index(monkeypatch, indexed):
    monkeypatch.setattr(replay, "INDEXED", indexed)
    blocks = trace(
        "start 5 w", "alloc 1 a", "alloc 2 b device=cuda:0", "free a", "alloc 4 c", "free w", "free c"
    ).allocations
    assert [blocks.alive_at(event, 0).tolist() for event in range(-1, 6)] == [
        [0],
        [0, 1],
        [0, 1],
        [0],
        [0, 3],
        [3],
        [],
    ]
    assert in_order(blocks.alive_after(np.array([0, 3]), 0)) == [(0, 0, 2), (1, 0, 1), (3, 1, 2)]
    assert in_order(blocks.alive_after(np.array([1, 5]), 1)) == [(2, 0, 2)]
