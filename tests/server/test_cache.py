"""The cache of what routes compute: once for each window and key, also for requests side by side."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import dataclass, replace

import numpy as np
import pytest

from tb_memplugin.server.cache import Cache, size_of
from tests.traces import trace

WINDOW = trace("alloc 1 a")


@dataclass(frozen=True, slots=True)
class Division:
    part: np.ndarray


class Result:
    """Something that a weak reference can watch."""


def test_results_are_kept_by_window_and_by_key():
    cache = Cache(1 << 20)
    result = cache.of_window(WINDOW, "a", Result)
    assert cache.of_window(WINDOW, "a", Result) is result
    assert cache.of_window(WINDOW, "b", Result) is not result
    assert cache.of_window(replace(WINDOW), "a", Result) is not result


def test_the_least_used_result_goes_first():
    cache = Cache(8_000)
    first, second = (cache.of_window(WINDOW, key, lambda: bytes(2_000)) for key in (1, 2))
    assert cache.of_window(WINDOW, 1, lambda: b"") is first
    cache.of_window(WINDOW, 3, lambda: bytes(2_000))
    assert cache.of_window(WINDOW, 1, lambda: b"") is first
    assert cache.of_window(WINDOW, 2, lambda: b"") is not second
    assert cache.bytes() <= 8_000


def test_a_result_that_is_looked_up_counts_as_used():
    cache = Cache(8_000)
    first = cache.get(1, lambda: bytes(2_000))
    cache.get(2, lambda: bytes(2_000))
    assert cache.kept(1) is first
    cache.get(3, lambda: bytes(3_500))
    assert (cache.kept(1), cache.kept(2)) == (first, None)


def test_a_result_above_the_bound_is_kept_until_the_next():
    cache = Cache(2_000)
    big = cache.get("big", lambda: bytes(5_000))
    assert cache.kept("big") is big
    cache.get("small", lambda: b"")
    assert cache.kept("big") is None


def test_sizes_are_those_of_arrays_and_texts():
    assert size_of(np.zeros(1_000, np.int64)) == 8_000
    assert 8_000 <= size_of([np.zeros(1_000, np.int64), "a"]) <= 8_200
    assert 9e6 < size_of(["a" * 41 + str(number) for number in range(100_000)]) < 11e6
    assert 8_000 <= size_of(Division(np.zeros(1_000, np.int64))) <= 8_200


def test_results_go_with_their_window():
    cache, window = Cache(1 << 20), replace(WINDOW)
    result = weakref.ref(cache.of_window(window, "a", Result))
    gc.collect()
    assert result() is not None
    del window
    gc.collect()
    assert result() is None


def test_requests_side_by_side_compute_a_result_once():
    cache, started, go_on = Cache(1 << 20), threading.Event(), threading.Event()
    computed: list[Result] = []

    def compute() -> Result:
        started.set()
        go_on.wait(10)
        computed.append(Result())
        return computed[-1]

    results: list[Result] = []
    threads = [
        threading.Thread(target=lambda: results.append(cache.of_window(WINDOW, "a", compute)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    started.wait(10)
    assert isinstance(cache.of_window(WINDOW, "b", Result), Result)  # another key does not wait
    go_on.set()
    for thread in threads:
        thread.join()
    assert results == computed * 4


def test_a_failure_is_not_kept():
    cache = Cache(1 << 20)
    with pytest.raises(ZeroDivisionError):
        cache.of_window(WINDOW, "a", lambda: 1 // 0)
    assert cache.of_window(WINDOW, "a", lambda: 2) == 2


def test_long_keys_count_too():
    cache = Cache(100_000)
    for number in range(100):
        cache.get(f"{number} {'x' * 20_000}", lambda: b"")
    assert 1 < len(cache._slots) < 5
