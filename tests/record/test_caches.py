"""Caches are found by how their blocks follow one another."""

import numpy as np
import pytest

from tb_memplugin.read.categories import Born
from tb_memplugin.record.provenance import grown
from tb_memplugin.trace import Phase, Reason

CALLS = 5
FOREVER = 10_000


def program(*blocks, reason=Reason.IN_FORWARD):
    """Blocks as (call, place in it, bytes, call in which it is freed), of five calls of 100 ns each.

    Returns:
        For each chain, the blocks in it; bytes a call; calls.
    """
    starts = np.arange(CALLS) * 1_000
    time = np.array([call * 1_000 + place for call, place, *_ in blocks])
    freed = np.array([FOREVER if last is None else last * 1_000 + 50 for *_, last in blocks])
    order = np.argsort(time, kind="stable")
    count = len(blocks)
    born = Born(
        time_ns=time[order],
        freed_ns=freed[order],
        device=np.zeros(count, np.uint8),
        bytes=np.array([size for _, _, size, _ in blocks])[order],
        phase=np.full(count, Phase.FORWARD, np.uint8),
        operator=np.zeros(count, np.int32),
        operator_end_ns=np.zeros(count, np.int64),
        recomputing=np.zeros(count, bool),
    )
    found = grown(born, np.zeros(count, np.int32), np.full(count, reason, np.uint8), starts, starts + 100)
    members = [sorted(found.block[found.chain == one].tolist()) for one in range(len(found.calls))]
    return members, found.bytes_per_call.tolist(), found.calls.tolist()


def test_a_block_that_grows_in_every_call_is_a_cache():
    assert program((0, 1, 16, 1), (1, 1, 24, 2), (2, 1, 32, 3), (3, 1, 40, None)) == (
        [[0, 1, 2, 3]],
        [8],
        [3],
    )


def test_keys_and_values_of_equal_sizes_are_two_chains():
    key = [(call, 1, 16 + 8 * call, call + 1) for call in range(4)]
    value = [(call, 2, 16 + 8 * call, call + 1) for call in range(4)]
    members, *_ = program(*key, *value)
    assert members == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_the_label_says_how_much_and_how_often():
    time = np.arange(3) * 1_000 + 1
    born = Born(
        time, time + 1_010, np.zeros(3, np.uint8), np.array([4_096, 20_480, 36_864]), np.full(3, 1, np.uint8),
        np.zeros(3, np.int32), np.zeros(3, np.int64), np.zeros(3, bool),
    )  # fmt: skip
    starts = np.arange(4) * 1_000
    found = grown(born, np.zeros(3, np.int32), np.full(3, Reason.IN_FORWARD, np.uint8), starts, starts + 100)
    assert found.labels() == ["grows by 16,384 bytes a call, in 2 calls"]


@pytest.mark.parametrize(
    "blocks",
    [
        [(call, 1, 16, call + 1) for call in range(4)],  # as large as before: the next batch
        [(call, 1, 16 + 8 * call, call) for call in range(4)],  # freed in its own call
        [(0, 1, 16, 1), (1, 1, 24, 2), (2, 1, 40, 3), (3, 1, 44, None)],  # other sizes in every call
        [(0, 1, 16, 1), (1, 1, 24, None)],  # two blocks show no growth
        [(call, 1, 16 + 8 * call, None) for call in range(4)],  # kept beside the next: a list that grows
        [(0, 1, 16, 2), (2, 1, 24, 4), (4, 1, 32, None)],  # not in every call
    ],
)
def test_other_blocks_are_no_cache(blocks):
    assert program(*blocks)[0] == []


def test_what_is_known_to_be_something_else_is_no_cache():
    blocks = [(call, 1, 16 + 8 * call, call + 1) for call in range(4)]
    assert program(*blocks, reason=Reason.HELD)[0] == []


def test_only_chains_with_a_marked_block_stay():
    time = np.repeat(np.arange(4) * 1_000, 2) + np.tile([1, 2], 4)
    born = Born(
        time, time + 1_010, np.zeros(8, np.uint8), 16 + 8 * np.arange(8) // 2 * 2, np.full(8, 1, np.uint8),
        np.zeros(8, np.int32), np.zeros(8, np.int64), np.zeros(8, bool),
    )  # fmt: skip
    starts = np.arange(5) * 1_000
    found = grown(born, np.zeros(8, np.int32), np.full(8, Reason.IN_FORWARD, np.uint8), starts, starts + 100)
    assert len(found.calls) == 2
    second = found.with_any(np.arange(8) == 3)
    assert sorted(second.block.tolist()) == [1, 3, 5, 7]
    assert second.chain.tolist() == [0, 0, 0, 0]
