"""Perfetto: counters that follow the levels, slices that nest, exact times."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from tb_memplugin.exports import perfetto
from tb_memplugin.exports.perfetto import Lanes
from tb_memplugin.trace import Annotations, OutOfMemory, Phase, Spans
from tests.traces import EPOCH, trace

SMALL = trace(
    "start 400 w category=parameter module=net.a device=cuda:0",
    "step 5",
    "alloc 100 a category=activation module=net.a phase=forward device=cuda:0 reserved=2048",
    "alloc 60 b category=gradient phase=backward device=cuda:0 reserved=4096",
    "free a phase=backward reserved=4096",
    "step 6",
    "free b reserved=2048",
    calls=[("net", 0, 1, "forward"), ("net.a", 0, 0, "forward"), ("net.a", 2, 2, "backward")],
)


def records(written, path):
    perfetto.write(written, path)
    document = json.loads(path.read_text("ascii"))
    return document["traceEvents"], document["otherData"]


def counter(events, name):
    return [
        (event["ts"], event["args"]["bytes"])
        for event in events
        if event["ph"] == "C" and event["name"] == name
    ]


@pytest.fixture
def events(tmp_path):
    return records(SMALL, tmp_path / "out.json")[0]


def test_allocated_and_reserved_are_counters(events):
    assert counter(events, "allocated") == [(0, 400), (0.5, 500), (1.5, 560), (2.5, 460), (3.5, 400)]
    assert counter(events, "reserved") == [(0.5, 2048), (1.5, 4096), (3.5, 2048)]


def test_each_category_is_a_counter_and_they_sum(events):
    assert counter(events, "allocated: parameter") == [(0, 400)]
    assert counter(events, "allocated: activation") == [(0, 0), (0.5, 100), (2.5, 0)]
    assert counter(events, "allocated: gradient") == [(0, 0), (1.5, 60), (3.5, 0)]


def test_steps_phases_and_calls_are_slices(events):
    slices = {event["name"]: (event["ts"], event["dur"]) for event in events if event["ph"] == "X"}
    assert slices == {
        "step 5": (0, 3),
        "step 6": (3, 1),
        "forward": (0, 1),
        "backward": (1, 2),
        "net": (0, 2),
        "net.a": (0, 1),
        "net.a (backward)": (2, 1),
    }


def test_slices_of_one_thread_nest(events):
    by_thread: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            by_thread.setdefault((event["pid"], event["tid"]), []).append(
                (event["ts"], event["ts"] + event["dur"])
            )
    for spans in by_thread.values():
        for a, b in ((a, b) for a in spans for b in spans if (a[0], -a[1]) < (b[0], -b[1])):
            assert b[0] >= a[1] or b[1] <= a[1]


def test_overlapping_annotations_get_lanes_of_their_own(tmp_path):
    at = Annotations(
        time_ns=np.array([0, 1_000, 2_000, 3_000]) + EPOCH,
        name=np.array([0, 1, 0, 1], np.int32),
        ends=np.array([0, 0, 1, 1], np.uint8),
        device=np.zeros(4, np.uint8),
        event=np.array([-1, 0, 1, 2]),
    )
    events, _ = records(replace(SMALL, annotations=at, annotation_names=("a", "b")), tmp_path / "out.json")
    found = {
        event["name"]: (event["ts"], event["dur"], event["tid"]) for event in events if event["ph"] == "X"
    }
    assert (found["a"], found["b"]) == ((0, 2, 1), (1, 2, 2))


@pytest.mark.parametrize("seed", range(10))
def test_slices_of_one_lane_stand_apart_or_inside_one_another(seed):
    """Viewers drop what overlaps without nesting."""
    random = Random(seed)
    starts = [random.randrange(30) for _ in range(40)]
    spans = sorted(((start, start + random.randrange(12)) for start in starts), key=lambda s: (s[0], -s[1]))
    lanes = Lanes()
    found: dict[int, list[tuple[int, int]]] = {}
    for span in spans:
        found.setdefault(lanes.take(*span), []).append(span)
    for inside in found.values():
        pairs = [(a, b) for row, a in enumerate(inside) for b in inside[row + 1 :]]
        assert all(b[0] >= a[1] or b[1] <= a[1] for a, b in pairs)


def test_running_out_of_memory_is_an_instant(tmp_path):
    events, _ = records(replace(SMALL, ooms=(OutOfMemory(2, 1_000_000, 5),)), tmp_path / "out.json")
    (found,) = [event for event in events if event["ph"] == "i"]
    assert (found["ts"], found["name"]) == (2.5, "out of memory: 1,000,000 bytes asked for")


def test_the_file_tells_when_it_begins(tmp_path):
    assert records(SMALL, tmp_path / "out.json")[1]["epoch_ns"] == str(EPOCH)


def test_hostile_names_stay_text(tmp_path):
    labelled = trace('alloc 1 a module="},{"', calls=[('"},{"', 0, 0, "forward")])
    events, _ = records(labelled, tmp_path / "out.json")
    assert '"},{"' in [event["name"] for event in events]


def test_an_empty_trace_is_a_document(tmp_path):
    assert [event["ph"] for event in records(trace(), tmp_path / "out.json")[0]] == ["M"]


def test_a_phase_that_began_before_the_first_event_has_an_exact_time(tmp_path):
    early = Spans(
        start_ns=np.array([EPOCH - 700]),
        end_ns=np.array([EPOCH + 300]),
        name=np.array([Phase.FORWARD], np.int32),
        depth=np.zeros(1, np.int32),
        phase=np.array([Phase.FORWARD], np.uint8),
    )
    events, _ = records(replace(SMALL, phases=early), tmp_path / "out.json")
    assert [(event["ts"], event["dur"]) for event in events if event["name"] == "forward"] == [(-0.7, 1.0)]
