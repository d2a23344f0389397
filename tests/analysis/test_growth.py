"""Advice: memory that grows from one recorded window to the next, and what only looks so."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tb_memplugin.analysis.advice_rules import advice
from tb_memplugin.analysis.findings import Finding
from tb_memplugin.analysis.growth import (
    MOST_WINDOWS,
    WindowLevel,
    monitored_growth,
    spread,
    steady_rise,
    window_levels,
)
from tests.step_figures import figures
from tests.traces import trace

SOURCE = "IterationReport"


def window(step, outlives, source=SOURCE, device="cpu"):
    """Two steps: some memory outlives them, a batch of the step before does not, each step keeps 10 bytes."""
    where = f"device={device}"
    recorded = trace(
        f"start {outlives} old {where}",
        f"start 900 batch {where}",
        f"step {step}",
        f"free batch {where}",
        f"alloc 10 a module=net operator=add {where}",
        f"alloc 30 grad category=gradient module=net operator=mm {where}",
        f"step {step + 1}",
        f"alloc 10 b module=net operator=add {where}",
    )
    return replace(recorded, source=source)


def growth(windows):
    levels = [level for one in windows for level in window_levels(one)]
    told = advice(windows[-1], run=lambda: levels)
    (judgement,) = (one for one in told.judgements if one.kind == "growth")
    return judgement, next((one for one in told.findings if one.kind == "growth"), None)


def test_a_leak_that_only_windows_show_is_found_with_its_slope_and_what_stayed_in_each():
    _, finding = growth([window(step, 100 + 10 * step) for step in (0, 10, 20, 30)])
    assert finding is not None
    assert (finding.bytes, finding.step, finding.level) == (10, 30, "problem")
    assert finding.levels == (100, 200, 300, 400)
    assert [(row.what, row.bytes) for row in finding.evidence] == [
        ("outlives the window at step 30", 400),
        ("outlived the window at step 0", 100),
        ("net · add", 10),
    ]


def test_windows_need_not_be_at_even_distances():
    _, finding = growth([window(step, 100 + 10 * step) for step in (0, 1, 50, 52, 300)])
    assert finding is not None
    assert finding.bytes == 10


def test_one_jump_of_a_warm_up_does_not_make_the_slope():
    """9,000 bytes in the first gap, then 10 a step: the median counts."""
    _, finding = growth(
        [window(step, level) for step, level in ((0, 0), (10, 9_000), (20, 9_100), (30, 9_200))]
    )
    assert finding is not None
    assert finding.bytes == 10


@pytest.mark.parametrize(
    "levels",
    [
        (500, 500, 500, 500, 500),
        (100, 300, 500, 500, 500),  # a queue that is full
        (100, 500, 100, 500, 100),
        (100, 200, 300, 400, 150),  # let go in the end
        (500, 400, 300, 200, 100),
    ],
)
def test_what_stays_fills_once_or_goes_again_is_fine(levels):
    judgement, finding = growth([window(10 * row, level) for row, level in enumerate(levels)])
    assert finding is None
    assert judgement.verdict == "fine"


def test_growth_that_does_not_matter_is_fine():
    levels = ((0, 1_000_000), (100, 1_000_100), (200, 1_000_200), (300, 1_000_300))
    judgement, _ = growth([window(step, level) for step, level in levels])
    assert judgement.verdict == "fine"
    assert "1 B per step" in judgement.why


def test_three_windows_are_too_few_and_it_is_said():
    judgement, _ = growth([window(step, 100 + 10 * step) for step in (0, 10, 20)])
    assert judgement.verdict == "not judged"
    assert "or 4 windows of one worker; found: 3" in judgement.why


def test_on_the_cpu_windows_of_torch_profiler_are_not_compared_for_they_begin_at_nothing():
    judgement, _ = growth([window(step, 100 + 10 * step, "torch.profiler") for step in (0, 10, 20, 30)])
    assert judgement.verdict == "not judged"
    assert "torch.profiler does not report" in judgement.why


def test_on_cuda_they_are_for_the_allocator_counts_all():
    _, finding = growth(
        [window(step, 100 + 10 * step, "torch.profiler", "cuda:0") for step in (0, 10, 20, 30)]
    )
    assert finding is not None
    assert finding.device == "cuda:0"


def test_a_window_with_enough_steps_answers_for_itself():
    lines = [
        line for step in range(3) for line in (f"step {step}", f"alloc 100 a{step} module=net operator=add")
    ]

    def run():
        raise AssertionError("the other windows are not asked")

    assert advice(trace(*lines), run=run).findings[0].subject == "net · add"


def test_of_many_windows_some_are_read_the_first_and_the_last_too():
    chosen = spread(range(1_000))
    assert (len(chosen), chosen[0], chosen[-1]) == (MOST_WINDOWS, 0, 999)
    assert spread([5, 6]) == [5, 6]
    assert spread([]) == []


def test_the_level_of_a_window_is_what_was_there_before_it_and_outlives_it():
    (level,) = window_levels(window(7, 100))
    assert level == WindowLevel(7, "cpu", 100, (("net · add", 10),))


def test_optimizer_state_that_comes_as_parts_of_the_model_are_first_used_is_no_growth():
    """A mixture of experts: each window another expert steps for the first time."""
    windows = [
        replace(
            trace(
                f"start {100 * (step + 1)} state category=optimizer_state",
                f"step {step}",
                "alloc 5 x",
                "free x",
            ),
            source=SOURCE,
        )
        for step in range(6)
    ]
    judgement, finding = growth(windows)
    assert finding is None
    assert judgement.verdict == "fine"


@pytest.mark.parametrize(
    ("levels", "steps", "rise"),
    [
        ([100, 110, 120, 130], [0, 1, 2, 3], 10),
        ([100, 120, 130, 150], [0, 2, 3, 5], 10),  # 20 in two steps, 10 in one, 20 in two
        ([100, 400, 410, 420], [0, 1, 2, 3], 10),  # a first step that makes more than later ones
        ([100, 400, 400, 400], [0, 1, 2, 3], 0),
        ([100, 110, 105, 120, 130], [0, 1, 2, 3, 4], 10),  # three of four
        ([100, 110, 120, 130, 130], [0, 1, 2, 3, 4], 0),  # not in the last
    ],
)
def test_a_steady_rise_is_the_median_one(levels, steps, rise):
    assert steady_rise(np.array(levels), np.array(steps), peak=1_000) == rise
    assert steady_rise(np.array(levels), np.array(steps), peak=10_000_000) == 0  # too little to matter


def of_process(count, end, heap_free):
    """Steps of a process that has `end` bytes after each, `heap_free` of them free; -1 where not read."""
    watched = figures([2 * size for size in end(np.arange(count)).tolist()], device="process")
    device = replace(watched.devices[0], heap_free=heap_free(np.arange(count)))
    return replace(watched, devices=(device,))


def test_a_process_that_grows_by_what_the_c_library_holds_free_is_told_so():
    """1 MiB more in each step, and 0.75 MiB more free in the heap, which is read in every fifth step."""
    watched = of_process(
        60, lambda at: (100 + at) << 20, lambda at: np.where(at % 5 == 0, 768 * 1024 * at + 4096, -1)
    )
    found = monitored_growth(watched, "process")
    assert isinstance(found, Finding)
    assert (found.bytes, found.title) == (
        1 << 20,
        "The process grows over 60 watched steps, because memory that it frees stays in the heap of the "
        "C library.",
    )
    heap = found.evidence[-1]
    assert (heap.what, heap.bytes, heap.detail) == (
        "free in the heap of the C library at the end of step 55",
        55 * 768 * 1024 + 4096,
        "rises 0.75 MiB per step",
    )
    assert "MALLOC_TRIM_THRESHOLD_" in found.what_to_do


@pytest.mark.parametrize(
    ("free", "shown"),
    [
        (lambda at: 0 * at + (30 << 20), ["does not rise"]),
        (lambda at: at << 18, ["rises 0.25 MiB per step"]),  # a quarter of the growth
        (lambda at: np.where(at == 59, 1 << 30, -1), []),  # one reading says nothing of growth
    ],
)
def test_a_process_that_grows_by_what_it_uses_is_told_to_find_the_holder(free, shown):
    found = monitored_growth(of_process(60, lambda at: (100 + at) << 20, free), "process")
    assert isinstance(found, Finding)
    assert found.title == "The process grows over 60 watched steps."
    assert [row.detail for row in found.evidence[2:]] == shown
    assert "still holds tensors" in found.what_to_do


def test_on_the_cpu_the_process_judges_growth_where_windows_cannot():
    window = trace("start 100 w", "step 0", "alloc 10 a", "free a")
    watched = of_process(60, lambda at: (100 + at) << 20, lambda at: at * 0 - 1)
    (found,) = advice(window, "cpu", watched=watched).findings
    assert (found.kind, found.device, found.bytes) == ("growth", "cpu", 1 << 20)
    assert (found.title, dict(found.where.state)) == (
        "The process grows over 60 watched steps.",
        {"device": "process", "step": "59"},
    )
