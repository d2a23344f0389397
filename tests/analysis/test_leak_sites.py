"""Suspected leaks: what grows step after step, and what only looks so."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tb_memplugin.analysis.leak_sites import holder, leaks, step_bounds
from tb_memplugin.trace import Annotations, MemoryTrace
from tests.analysis.histories import allocator_trace, steps_of
from tests.traces import EPOCH, MICROSECOND, trace

STACKS = (("append train.py:9", "main train.py:1"), ("forward net.py:3",), ("cache net.py:7",))


def test_what_grows_in_every_step_and_stays_is_suspected() -> None:
    history = steps_of(
        "alloc 100 loss# module=net operator=aten::add",
        "alloc 900 t#",
        "free t#",
        count=4,
        before=("start 70 w",),
    )
    (leak,) = leaks(history, 0)
    assert (leak.key, leak.frames) == ("net · aten::add", ())
    assert (leak.bytes, leak.blocks, leak.bytes_per_step) == (400, 4, 100)
    assert (leak.steps, leak.of_steps, leak.slope_bytes, leak.first_event) == (4, 4, 100.0, 0)


@pytest.mark.parametrize(
    ("labels", "name"),
    [
        (("held by __main__.seen[0]", "held by __main__.seen[1]", "held by __main__.last"), "seen[*]"),
        (
            ("held by train.seen['a'][0]", "held by train.seen['b'][7]", "held by __main__.last"),
            "train.seen[*][*]",
        ),
        (("held by a", "held by b", "held by c"), ""),
        (("held by a local variable, or C++",) * 3, ""),
        (("held by a reference cycle: Node",) * 3, ""),
    ],
)
def test_what_holds_half_of_what_a_site_keeps_is_named(labels: tuple[str, ...], name: str) -> None:
    steps = [
        line for step in range(3) for line in (f"step {step}", f"alloc 10 x{step} module=net label=l{step}")
    ]
    history = trace(*steps, "alloc 900 other module=head label=l0")
    (leak,) = leaks(history, 0)
    assert holder(replace(history, labels=labels), 0, [leak.key]) == name


def test_a_cache_that_is_filled_once_is_no_leak() -> None:
    steps = [line for step in range(4) for line in (f"step {step}", f"alloc 9 t{step}", f"free t{step}")]
    assert leaks(trace(steps[0], "alloc 500 cache module=net", *steps[1:]), 0) == ()


def test_what_is_replaced_in_each_step_is_no_leak() -> None:
    lines = ["step 0", "alloc 300 g0 module=net"]
    for step in range(1, 6):
        lines += [f"step {step}", f"free g{step - 1}", f"alloc 300 g{step} module=net"]
    assert leaks(trace(*lines), 0) == ()


def replaced_by(*sizes: int, before: int = 0) -> MemoryTrace:
    """One block in each step, in whose place the next step puts one of the next size."""
    lines, last = ([f"start {before} g module=net"], "free g") if before else ([], "")
    for step, size in enumerate(sizes):
        lines += [f"step {step}", f"alloc {size} g{step} module=net", *([last] if last else [])]
        last = f"free g{step}"
    return trace(*lines)


def test_what_is_replaced_by_more_in_each_step_is_suspected() -> None:
    """As `all = torch.cat([all, new])` does, of which only the last one stays."""
    (leak,) = leaks(replaced_by(200, 300, 400, 500, before=100), 0)
    assert (leak.bytes, leak.bytes_per_step, leak.slope_bytes) == (400, 100, 100.0)
    assert (leak.steps, leak.of_steps, leak.blocks, leak.is_replaced) == (4, 4, 1, True)


@pytest.mark.parametrize("steps_before", [0, 2])
def test_of_what_was_not_known_before_the_first_step_tells_nothing(steps_before: int) -> None:
    """Nor where the program begins to keep it in a later step."""
    (leak,) = leaks(replaced_by(*[0] * steps_before, 900, 1000, 1100, 1200), 0)
    assert (leak.bytes, leak.slope_bytes, leak.steps) == (300, 100.0, 3)


@pytest.mark.parametrize(
    "sizes",
    [(100, 200, 300), (100, 200, 300, 600), (100, 300, 200, 400, 500), (100, 200, 300, 300, 400)],
    ids=["three steps", "by leaps", "down once", "no rise once"],
)
def test_sizes_that_rise_for_a_while_or_unevenly_are_those_of_batches(sizes: tuple[int, ...]) -> None:
    assert leaks(replaced_by(*sizes), 0) == ()


def test_what_is_replaced_by_more_because_batches_grow_is_no_leak() -> None:
    lines = ["start 100 g module=net"]
    for step, last in enumerate(("g", "g0", "g1", "g2")):
        size = 200 + 100 * step
        lines += [f"step {step}", f"alloc {3 * size} a", f"alloc {size} g{step} module=net"]
        lines += ["free a", f"free {last}"]
    assert leaks(trace(*lines), 0) == ()


def test_a_queue_that_holds_the_last_three_steps_is_no_leak() -> None:
    lines: list[str] = []
    for step in range(6):
        lines += [f"step {step}", f"alloc 50 b{step} module=loader"]
        lines += [f"free b{step - 3}"] if step >= 3 else []
    assert leaks(trace(*lines), 0) == ()


@pytest.mark.parametrize("module", ["module=loader", ""])  # without stacks of what was there before, none
@pytest.mark.parametrize("length", [2, 3, 4, 5, 6])
def test_a_queue_that_was_full_before_the_window_is_no_leak(length: int, module: str) -> None:
    lines = [f"start 50 b{step} {module}".rstrip() for step in range(-length, 0)]
    for step in range(5):
        lines += [f"step {step}", f"free b{step - length}", f"alloc 50 b{step} module=loader"]
    assert leaks(trace(*lines), 0) == ()


def test_more_than_what_a_queue_passes_on_is_suspected() -> None:
    lines = [f"start 50 b{step}" for step in range(-5, 0)]
    for step in range(4):
        lines += [f"step {step}", f"free b{step - 5}", f"alloc 50 b{step} module=loader"]
        lines += [f"alloc 50 c{step} module=loader", f"alloc 8 d{step} module=net"]
    assert {leak.key: leak.bytes for leak in leaks(trace(*lines), 0)} == {
        "loader · (no operator)": 400,
        "net · (no operator)": 32,
    }


def test_growth_that_has_ended_is_no_leak() -> None:
    grows = [line for step in range(3) for line in (f"step {step}", f"alloc 50 b{step} module=cache")]
    idle = [line for step in (3, 4) for line in (f"step {step}", f"alloc 9 t{step}", f"free t{step}")]
    assert leaks(trace(*grows, *idle), 0) == ()


def test_fewer_than_three_whole_steps_are_no_evidence() -> None:
    assert leaks(steps_of("alloc 100 x# module=net", count=2), 0) == ()
    assert len(leaks(steps_of("alloc 100 x# module=net", count=3), 0)) == 1


def test_one_step_of_four_may_be_quiet_but_not_two() -> None:
    grows = [f"alloc 100 x{step} module=net" for step in range(4)]
    idle = [f"alloc 1 t{step} operator=t" for step in range(4)]
    lines = [
        line for step in range(4) for line in (f"step {step}", idle[step], *grows[step : step + (step != 1)])
    ]
    (leak,) = [leak for leak in leaks(trace(*lines), 0) if leak.key.startswith("net")]
    assert (leak.steps, leak.of_steps, leak.bytes, leak.bytes_per_step) == (3, 4, 300, 75)
    lines = [
        line for step in range(4) for line in (f"step {step}", idle[step], *grows[step : step + (step > 1)])
    ]
    assert [leak.key for leak in leaks(trace(*lines), 0)] == ["(not named) · t"]


def test_what_was_freed_before_the_end_of_the_last_step_is_no_leak() -> None:
    lines = [line for step in range(4) for line in (f"step {step}", f"alloc 100 x{step} module=net")]
    assert leaks(trace(*lines, *(f"free x{step}" for step in range(4))), 0) == ()


def test_stacks_tell_places_apart_and_come_largest_first() -> None:
    step = "alloc {}M 100 stack=0", "alloc {}M 700 stack=2", "alloc 64M 5 stack=1", "free_completed 64M 5"
    lines = [line.format(16 * (place + 1) + row) for row in range(4) for place, line in enumerate(step)]
    history = allocator_trace(*lines, stacks=STACKS, **optimizer_steps(0, 4, 8, 12, 16))
    first, second = leaks(history, 0)
    assert (first.key, first.bytes_per_step) == ("cache net.py:7", 700)
    assert (second.frames, second.key) == (STACKS[0], "append train.py:9\nmain train.py:1")
    assert (second.of_steps, second.bytes) == (4, 400)


def optimizer_steps(
    *events: int, name: str = "Optimizer.step#SGD.step", ends: tuple[int, ...] = ()
) -> dict[str, object]:
    """An annotation that starts just before each of some events."""
    time = EPOCH + MICROSECOND * np.array(events) - 1
    return {
        "annotations": Annotations(
            time,
            np.zeros(len(events), np.int32),
            np.array(ends or [0] * len(events), np.uint8),
            np.zeros(len(events), np.uint8),
            np.array(events) - 1,
        ),
        "annotation_names": (name,),
    }


def growing(count: int) -> list[str]:
    return [f"alloc {16 + step}M 100 stack=0" for step in range(count)]


def test_annotations_stand_for_steps_where_there_is_only_one() -> None:
    history = allocator_trace(*growing(6), stacks=STACKS, **optimizer_steps(1, 2, 3, 4))
    assert step_bounds(history, 0).tolist() == [1, 2, 3, 4]
    (leak,) = leaks(history, 0)
    assert (leak.of_steps, leak.bytes, leak.first_event) == (3, 300, 1)


def growing_in(*patterns: str) -> MemoryTrace:
    """A step of an optimizer for each sign: in `x`, the pattern's place keeps 100 bytes, in `-` none."""
    keeps = ("alloc {at} 100 stack={place}", "alloc 8M 5", "free_completed 8M 5")
    frees = ("alloc {at} 100 stack={place}", "free_requested {at} 100", "free_completed {at} 100")
    lines = [
        line.format(at=f"{64 * (place + 1) + step}M", place=place)
        for step, signs in enumerate(zip(*patterns, strict=True))
        for place, sign in enumerate(signs)
        for line in (keeps if sign == "x" else frees)
    ]
    each = 3 * len(patterns)
    return allocator_trace(*lines, stacks=STACKS, **optimizer_steps(*range(0, len(lines) + 1, each)))


@pytest.mark.parametrize(
    ("pattern", "each", "steps"),
    [
        ("-x-x-x", 100, 3),
        ("x-x-x-x-x-x", 100, 5),
        ("x--x--x--", 100, 3),
        ("xx-" * 3, 200, 3),
        ("---x" * 3, 100, 3),
    ],
)
def test_what_grows_in_every_iteration_of_several_steps_is_suspected(
    pattern: str, each: int, steps: int
) -> None:
    """As in training with two optimizers of one class, each of whose annotations begins a step."""
    (leak,) = leaks(growing_in(pattern), 0)
    assert (leak.frames, leak.bytes, leak.bytes_per_step) == (STACKS[0], steps * each, each)
    assert (leak.steps, leak.of_steps, leak.slope_bytes) == (steps, steps, each)
    assert (leak.blocks, leak.is_replaced) == (steps * each // 100, False)


@pytest.mark.parametrize("pattern", ["x-x-x", "x-x-x---", "-x-xx-x-", "x-----x-", "----x" * 4, "-" * 9])
def test_what_grows_in_some_steps_without_a_rhythm_is_no_leak(pattern: str) -> None:
    assert leaks(growing_in(pattern), 0) == ()


def test_bytes_of_all_leaks_are_those_of_the_same_steps() -> None:
    every, second = leaks(growing_in("xxxxxx", "-x-x-x"), 0)
    assert (every.of_steps, every.steps, every.bytes_per_step) == (6, 6, 100)
    assert (second.of_steps, second.steps, second.bytes_per_step) == (6, 3, 50)


def test_a_profiles_own_steps_are_whole_iterations() -> None:
    lines = [
        line
        for step in range(6)
        for line in (f"step {step}", f"alloc 100 b{step}", *([f"free b{step}"] if step % 2 else []))
    ]
    assert leaks(trace(*lines), 0) == ()


def test_the_end_of_an_annotation_begins_no_step() -> None:
    told = optimizer_steps(0, 1, 2, 3, 4, 5, ends=(0, 1, 0, 1, 0, 1))
    assert len(step_bounds(allocator_trace(*growing(6), stacks=STACKS, **told), 0)) == 0


def test_three_beginnings_enclose_only_two_steps() -> None:
    assert leaks(allocator_trace(*growing(6), stacks=STACKS, **optimizer_steps(1, 2, 3)), 0) == ()


def test_an_annotation_that_is_no_step_counts_only_if_asked_for() -> None:
    history = allocator_trace(*growing(6), stacks=STACKS, **optimizer_steps(1, 2, 3, 4, name="layer"))
    assert leaks(history, 0) == ()
    assert len(leaks(history, 0, "layer")) == 1


def test_without_steps_nothing_is_found() -> None:
    assert leaks(allocator_trace(*growing(6), stacks=STACKS), 0) == ()


@pytest.mark.parametrize("device", [0, 1])
def test_each_device_has_leaks_of_its_own(device: int) -> None:
    lines = [f"alloc {16 + step}M {100 + step} stack=0 device={step % 2}" for step in range(8)]
    history = allocator_trace(*lines, stacks=STACKS, **optimizer_steps(0, 2, 4, 6))
    (leak,) = leaks(history, device)
    assert leak.bytes == 3 * (102 + device)


def test_steps_before_a_devices_first_event_say_nothing_about_it() -> None:
    lines = [f"alloc {16 + step}M 100 stack=0 device={int(step >= 4)}" for step in range(8)]
    history = allocator_trace(*lines, stacks=STACKS, **optimizer_steps(*range(8)))
    assert step_bounds(history, 1).tolist() == [4, 5, 6, 7]
    (leak,) = leaks(history, 1)
    assert (leak.steps, leak.of_steps, leak.bytes) == (3, 3, 300)


def test_steps_that_two_other_devices_tell_are_counted_once() -> None:
    lines = [f"alloc {16 + place}M 100 stack=0 device={place % 3}" for place in range(15)]
    twice = optimizer_steps(*(place for place in range(15) if place % 3 < 2))
    twice["annotations"].device[1::2] = 1  # type: ignore[attr-defined]
    history = allocator_trace(*lines, stacks=STACKS, **twice)
    assert step_bounds(history, 2).tolist() == [2, 5, 8, 11, 14]
