"""The cache of what routes compute: once for each window and key, also for requests side by side."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import replace

import pytest

from tb_memplugin.server.window_cache import WindowCache
from tests.traces import trace

WINDOW = trace("alloc 1 a")


class Result:
    """Something that a weak reference can watch."""


def test_results_are_kept_by_window_and_by_key():
    cache = WindowCache(8)
    result = cache.get(WINDOW, "a", Result)
    assert cache.get(WINDOW, "a", Result) is result
    assert cache.get(WINDOW, "b", Result) is not result
    assert cache.get(replace(WINDOW), "a", Result) is not result


def test_the_least_used_result_goes_first():
    cache = WindowCache(2)
    first, second = cache.get(WINDOW, 1, Result), cache.get(WINDOW, 2, Result)
    assert cache.get(WINDOW, 1, Result) is first
    cache.get(WINDOW, 3, Result)
    assert cache.get(WINDOW, 1, Result) is first
    assert cache.get(WINDOW, 2, Result) is not second


def test_results_go_with_their_window():
    cache, window = WindowCache(8), replace(WINDOW)
    result = weakref.ref(cache.get(window, "a", Result))
    gc.collect()
    assert result() is not None
    del window
    gc.collect()
    assert result() is None


def test_requests_side_by_side_compute_a_result_once():
    cache, started, go_on = WindowCache(8), threading.Event(), threading.Event()
    computed: list[Result] = []

    def compute() -> Result:
        started.set()
        go_on.wait(10)
        computed.append(Result())
        return computed[-1]

    results: list[Result] = []
    threads = [
        threading.Thread(target=lambda: results.append(cache.get(WINDOW, "a", compute))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    started.wait(10)
    assert isinstance(cache.get(WINDOW, "b", Result), Result)  # another key does not wait
    go_on.set()
    for thread in threads:
        thread.join()
    assert results == computed * 4


def test_a_failure_is_not_kept():
    cache = WindowCache(8)
    with pytest.raises(ZeroDivisionError):
        cache.get(WINDOW, "a", lambda: 1 // 0)
    assert cache.get(WINDOW, "a", lambda: 2) == 2
