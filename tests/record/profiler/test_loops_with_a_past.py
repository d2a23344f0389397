"""Every byte that is alive before a window is counted, as a counter beneath the allocator says."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tb_memplugin import load, memory_trace_handler
from tb_memplugin.analysis.account import account_line, accounts
from tb_memplugin.record.profiler import window as recording
from tb_memplugin.trace import Cause, Moment
from tests.record.profiler import loops_with_a_past

ORACLE = Path(__file__).parents[1] / "exact_cpu" / "oracle.c"


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """The figures of each loop, of the handler's two windows and of the tracer."""
    if sys.platform != "linux" or shutil.which("cc") is None:
        pytest.skip("needs Linux and a C compiler")
    folder = tmp_path_factory.mktemp("loops")
    library = folder / "oracle.so"
    subprocess.run(
        ["cc", "-O1", "-shared", "-fPIC", str(ORACLE), "-o", str(library), "-ldl", "-lpthread"], check=True
    )
    done = subprocess.run(
        [sys.executable, "-m", loops_with_a_past.__name__, str(folder)],
        env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[dict[str, Any]]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            row = json.loads(line)
            found.setdefault(row["loop"], []).append(row)
    return found


FREED_BETWEEN = "Up to 1,280 bytes that earlier windows allocated are not counted"
"""What only autograd's code held when the first window ended, and a step before the second one freed."""

WRAPPERS = 4 + 4 + 3 + 1
"""Weights, their gradients, batches, and the last output: tensors that have no memory of their own."""

LOOPS = [loop.__name__ for loop in loops_with_a_past.LOOPS]


@pytest.mark.parametrize("loop", LOOPS)
def test_both_windows_have_the_counters_bytes_at_start_peak_and_end(figures, loop):
    windows = figures[loop]
    assert [window["recorded"] for window in windows] == [window["true"] for window in windows]
    first, second = (window["notes"] for window in windows)
    if loop == "tensors_that_wrap_others":
        assert [int(note.split()[0]) for note in (*first, *second)] == [WRAPPERS] * 2
        return
    assert first == []
    if loop == "graph_of_the_step_before":
        assert len(second) <= 1
        assert all(note.startswith(FREED_BETWEEN) for note in second)
    else:
        assert second == []


@pytest.mark.parametrize("loop", LOOPS)
def test_the_tracer_has_the_same_bytes_as_the_handler_before_and_after(figures, loop):
    (traced,) = figures[f"{loop}, traced"]
    start, peak, end = traced["true"]
    assert (traced["recorded"][0], traced["recorded"][2]) == (start, end)
    # A dispatch mode makes tensors of 8 bytes from numbers, which no mode sees.
    assert 0 <= peak - traced["recorded"][1] <= 8


@pytest.mark.parametrize("loop", ["data_set_in_tensors", "last_logits_stay", "last_loss_and_output_stay"])
def test_what_is_replaced_in_each_step_does_not_grow(figures, loop):
    for window in figures[loop]:
        start, _, end = window["recorded"]
        assert start == end


def test_a_search_that_takes_too_long_is_not_made_again_and_says_so(monkeypatch):
    data = torch.ones(1000)
    monkeypatch.setattr(recording, "LONGEST_SEARCH_NS", 0)
    recorder = recording.WindowRecorder({}, [])
    seen = []
    for _ in range(2):
        recorder.start()
        recorder.stop()
        taken = recorder.take()
        assert taken is not None
        seen.append((data.data_ptr() in {one.address for one in taken.start}, taken.problems))
    assert seen[0] == (True, [])
    assert seen[1][0] is False
    assert "the search for the rest took" in seen[1][1][0]


def test_a_search_that_fails_costs_the_search_and_not_the_window(monkeypatch):
    def fails(*_):
        raise RuntimeError("no")

    monkeypatch.setattr(recording, "alive_now", fails)
    recorder = recording.WindowRecorder({}, [])
    recorder.start()
    recorder.stop()
    taken = recorder.take()
    assert taken is not None
    assert list(taken.open_problems) == [
        "Recording at the search for what is alive failed (RuntimeError: no)."
    ]


def test_python_does_not_search_for_garbage_while_a_window_begins(monkeypatch):
    """Its collector would look again and again at what the search makes, and run code of the program."""
    was_on: list[bool] = []

    def looks(*_: object) -> list[Any]:
        was_on.append(gc.isenabled())
        return []

    monkeypatch.setattr(recording, "alive_now", looks)
    recorder = recording.WindowRecorder({}, [])
    recorder.start()
    recorder.stop()
    assert was_on == [False]
    assert gc.isenabled()


@pytest.mark.parametrize("begins", ["before", "within"])
@pytest.mark.parametrize("ends", ["within", "after"])
def test_what_another_thread_left_alive_is_missing_at_the_end(tmp_path, begins, ends):
    """A pool's thread makes 4,000 bytes in the window; 400 are the profiled thread's own."""
    with ThreadPoolExecutor(1) as pool:
        if begins == "before":
            pool.submit(int).result()
        handler = memory_trace_handler(tmp_path, "worker")
        with torch.profiler.profile(profile_memory=True, on_trace_ready=handler):
            kept = [pool.submit(torch.ones, 1000).result(), torch.ones(100)]
            if ends == "within":
                pool.shutdown()
    trace = load(tmp_path)
    (end,) = [one for one in accounts(trace, 0) if one.moment is Moment.END]
    assert end.causes == ((Cause.UNSEEN, 4000),)
    assert account_line(accounts(trace, 0)).level == "different"
    del kept
