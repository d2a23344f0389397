"""Tests for the search for the largest batch that fits, with few estimates."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.answer.changes import MOST, Need, max_batch


def memory(fixed, sample, limit, step=1):
    """Return a function for the need of a batch: `fixed` plus `sample` each, in multiples of `step`."""

    def need_of(batch):
        size = -(-(fixed + sample * batch) // step) * step
        return Need(size, size <= limit)

    return need_of


def test_a_line_is_aimed_at():
    found = max_batch(memory(fixed=100, sample=7, limit=1000), 1000)
    assert found.batch == 128  # 100 + 7 * 128 = 996
    assert [batch for batch, _ in found.needs] == [1, 2, 128, 129, 130]


def test_the_answer_and_the_next_larger_one_were_estimated():
    found = max_batch(memory(fixed=100, sample=7, limit=1000), 1000)
    needs = dict(found.needs)
    assert needs[found.batch].fits
    assert not needs[found.batch + 1].fits


def test_not_even_one():
    found = max_batch(memory(fixed=100, sample=7, limit=50), 50)
    assert (found.batch, found.estimates) == (0, 1)


def test_one_alone():
    assert max_batch(memory(fixed=0, sample=40, limit=50), 50).batch == 1


def test_what_fits_at_any_batch_ends_at_the_most_that_is_looked_for():
    found = max_batch(memory(fixed=1, sample=0, limit=50), 50)
    assert found.batch == MOST
    assert found.estimates < 15


def test_a_most_of_none_is_refused():
    with pytest.raises(MemPluginError, match="0 is not a batch size"):
        max_batch(memory(0, 1, 1), 1, most=0)


@given(
    fixed=st.integers(0, 10_000),
    sample=st.integers(1, 1_000),
    step=st.sampled_from([1, 2, 20, 512]),
    limit=st.integers(1, 1_000_000),
)
def test_any_memory_that_grows_is_solved(fixed, sample, step, limit):
    need_of = memory(fixed, sample, limit, step)
    found = max_batch(need_of, limit)
    assert found.batch == 0 or need_of(found.batch).fits
    assert found.batch == MOST or not need_of(found.batch + 1).fits
    assert found.estimates <= 50


@given(fixed=st.integers(0, 10_000), limit=st.integers(10_000, 10_000_000))
def test_memory_that_grows_faster_and_faster_is_solved_too(fixed, limit):
    def need_of(batch):
        return Need(fixed + batch * batch, fixed + batch * batch <= limit)

    found = max_batch(need_of, limit)
    assert found.batch**2 <= limit - fixed < (found.batch + 1) ** 2
    assert found.estimates <= 50
