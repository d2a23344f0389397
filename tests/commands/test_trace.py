"""`tb-memplugin trace`: events as text. STEP has 300 bytes that stay, and 90 that come and go."""

from __future__ import annotations

import json

import pytest

from tests.commands.files import run, step_snapshot, write


@pytest.fixture
def step(tmp_path):
    return write(tmp_path / "step.pickle", step_snapshot())


def lines(*arguments):
    done = run("trace", *arguments)
    assert done.exit_code == 0, done.output
    return done.stdout.splitlines()


def test_every_event_is_a_line(step):
    heading, *events = lines(step)
    assert heading == "cuda:0: 4 events; 0 B live before the first of all"
    assert [event.split(maxsplit=5) for event in events] == [
        ["0", "0.000000", "alloc", "0x1000", "300", "default stream  model.py:7 (forward)"],
        ["1", "0.000010", "alloc", "0x1200", "90", "default stream  optim.py:3 (step)"],
        ["2", "0.000020", "free_requested", "0x1200", "90", "default stream"],
        ["3", "0.000030", "free_completed", "0x1200", "90", "default stream"],
    ]


def test_a_free_with_the_stack_of_its_allocation_has_no_line(tmp_path):
    content = step_snapshot()
    (events,) = content["device_traces"]
    for event in events[2:]:
        event["frames"] = events[1]["frames"]  # as without context="all"
    path = write(tmp_path / "alloc.pickle", content)
    assert [event.rpartition("  ")[2] for event in lines(path)[2:]] == [
        "optim.py:3 (step)",
        *["default stream"] * 2,
    ]


def test_without_freed_blocks_what_stays_is_left(step):
    _, *events = lines(step, "--filter-freed")
    assert [event.split()[0] for event in events] == ["0"]
    _, *events = lines(step, "--filter-freed", "--until", "0x1200")
    assert [event.split()[0] for event in events] == ["0", "1"], "it is freed after the range"


def test_a_range_and_stacks(step):
    assert lines(step, "--end", "0s", "--stacks")[2:] == [
        "          at::empty ??:0",
        "          forward model.py:7",
    ]


def test_as_json(step):
    events = [json.loads(line) for line in lines(step, "--json")]
    assert [event["live_bytes"] for event in events] == [300, 390, 390, 300]
    assert events[0] == {
        "device": "cuda:0",
        "event": 0,
        "time_ns": 0,
        "seconds": 0.0,
        "action": "alloc",
        "address": 0x1000,
        "bytes": 300,
        "stream": "default stream",
        "live_bytes": 300,
        "line": "model.py:7 (forward)",
        "stack": ["at::empty ??:0", "forward model.py:7"],
    }


def test_names_cannot_control_the_terminal(tmp_path):
    content = step_snapshot()
    content["device_traces"][0][0]["frames"] = [{"filename": "a\x1b[2J.py", "name": "f\n", "line": 1}]
    path = write(tmp_path / "evil.pickle", content)
    assert "\x1b" not in run("trace", path, "--stacks").stdout
    assert len(lines(path)) == 5
