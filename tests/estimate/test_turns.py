"""Tests that one estimate runs at a time: threads wait for each other, and an endless wait raises."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Queue

import pytest

from tb_memplugin import MemoryEstimator, MemPluginError
from tb_memplugin.estimate.answer import estimator


def estimate() -> None:
    with MemoryEstimator(device="cpu"):
        pass


def in_a_thread(run: Callable[[], None]) -> tuple[threading.Thread, list[str]]:
    """Start a thread; return it and the list of errors that it raised."""
    told: list[str] = []

    def body() -> None:
        try:
            run()
        except MemPluginError as error:
            told.append(str(error))

    thread = threading.Thread(target=body, name="second")
    thread.start()
    return thread, told


def test_a_thread_whose_end_the_block_waits_for_is_told_at_once() -> None:
    with MemoryEstimator(device="cpu"):
        thread, told = in_a_thread(estimate)
        thread.join(timeout=20)
        assert not thread.is_alive()
    assert "Another thread is inside an estimate (MainThread) and waits for this one" in told[0]
    assert "in second" in told[0]


@pytest.mark.parametrize("waits", ["future", "queue", "event"])
def test_other_ways_to_wait_are_told_after_a_while(waits: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimator, "PATIENCE", 0.3)
    ended, queue = threading.Event(), Queue[int]()

    def run() -> None:
        try:
            estimate()
        finally:
            ended.set()
            queue.put(1)

    with MemoryEstimator(device="cpu"), ThreadPoolExecutor(1) as pool:
        future = pool.submit(run)
        {"future": lambda: future.exception(20), "queue": lambda: queue.get(timeout=20), "event": ended.wait}[
            waits
        ]()
        assert isinstance(future.exception(20), MemPluginError)


def test_a_thread_waits_for_a_block_that_works() -> None:
    with MemoryEstimator(device="cpu"):
        thread, told = in_a_thread(estimate)
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            sum(range(1000))
    thread.join(timeout=20)
    assert not thread.is_alive()
    assert told == []


def test_blocks_may_nest() -> None:
    with MemoryEstimator(device="cpu"):
        estimate()
    estimate()
