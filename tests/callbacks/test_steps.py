"""Which steps are profiled."""

from __future__ import annotations

import pickle

import pytest
from torch.profiler import schedule

from tb_memplugin.callbacks.recorder import ChosenSteps


def chosen(steps, first=0, last=12):
    """The steps of a training from `first` on; a `|` stands where a window ends."""
    which = ChosenSteps(steps)
    which.start_at(first)
    return " ".join(
        f"{step}|" if which.ends_window(step) else str(step) for step in range(first, last) if which.has(step)
    )


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (None, "2 3 4|"),
        ([0], "0|"),
        ([7, 3, 4, 3], "3 4| 7|"),
        (range(4, 7), "4 5 6|"),
        (range(6, 2, -2), "4| 6|"),
        (iter([1, 2]), "1 2|"),
        (schedule(wait=1, warmup=1, active=2, repeat=2), "2 3| 6 7|"),
        (schedule(skip_first=5, wait=0, warmup=1, active=1, repeat=1), "6|"),
    ],
)
def test_steps_that_follow_each_other_are_one_window(steps, expected):
    assert chosen(steps) == expected


def test_windows_of_a_schedule_that_touch_stay_apart():
    assert chosen(schedule(wait=0, warmup=1, active=1, repeat=2)) == "1| 3|"


def test_numbers_are_those_of_the_whole_training_when_it_is_resumed():
    assert chosen([2, 10], first=9) == "10|"


def test_a_schedule_and_the_default_count_from_where_the_run_begins():
    assert chosen(None, first=100, last=110) == "102 103 104|"
    assert chosen(schedule(wait=1, warmup=1, active=1, repeat=1), first=100, last=110) == "102|"


def test_a_range_is_never_spelled_out():
    assert chosen(range(5, 10**18), last=8) == "5 6 7"


@pytest.mark.parametrize("steps", ["10", 10, [1.5], ["a"], object()])
def test_what_is_no_number_is_refused(steps):
    with pytest.raises(TypeError, match="whole numbers"):
        ChosenSteps(steps)


@pytest.mark.parametrize("steps", [[], range(0), [-1], range(3, -2, -1), range(-5, 5)])
def test_no_step_and_negative_ones_are_refused(steps):
    with pytest.raises(ValueError, match="steps"):
        ChosenSteps(steps)


def test_numbers_and_the_default_travel_to_other_processes():
    for steps in (None, [1, 2], range(3)):
        assert pickle.loads(pickle.dumps(ChosenSteps(steps))).has(2)
