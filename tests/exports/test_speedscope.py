"""speedscope: samples are stacks, outermost first, and their weights sum to the peak."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import numpy as np

from tb_memplugin.exports import speedscope
from tb_memplugin.trace import TensorMetadata
from tests.traces import trace

SPEEDSCOPE = Path(__file__).parents[2] / "frontend" / "node_modules" / "speedscope" / "dist" / "release"
SCHEMA = SPEEDSCOPE / "file-format-schema.json"
UNITS = {"none", "nanoseconds", "microseconds", "milliseconds", "seconds", "bytes"}

STACKED = trace("start 40 w", "alloc 100 a", "alloc 20 b", "alloc 7 c", "free c", "alloc 3 d")
STACKED = replace(
    STACKED,
    stacks=(("inner a.py:1", "main b.py:2"), ("other(int, char) ??:0", "main b.py:2")),
    events=replace(STACKED.events, stack=np.array([0, 1, 0, -1, 0], np.int32)),
)


def check(document):
    """speedscope's own schema, and what it leaves to the reader: rows in range, weights that sum."""
    if SCHEMA.exists():
        jsonschema.validate(document, json.loads(SCHEMA.read_text("utf-8")))
    assert document["$schema"] == "https://www.speedscope.app/file-format-schema.json"
    frames = document["shared"]["frames"]
    for frame in frames:
        assert set(frame) <= {"name", "file", "line", "col"}
        assert isinstance(frame["name"], str)
        assert isinstance(frame.get("file", ""), str)
        assert isinstance(frame.get("line", 0), int)
    assert set(document) <= {"$schema", "shared", "profiles", "name", "activeProfileIndex", "exporter"}
    assert isinstance(document["name"], str)
    assert isinstance(document["exporter"], str)
    assert type(document["activeProfileIndex"]) is int
    for profile in document["profiles"]:
        assert isinstance(profile["name"], str)
        ends = profile["startValue"], profile["endValue"]
        assert set(map(type, (*ends, *profile["weights"]))) == {int}
        assert {type(row) for sample in profile["samples"] for row in sample} <= {int}
        assert set(profile) == {"type", "name", "unit", "startValue", "endValue", "samples", "weights"}
        assert profile["type"] == "sampled"
        assert profile["unit"] in UNITS
        assert len(profile["samples"]) == len(profile["weights"])
        assert sum(profile["weights"]) == profile["endValue"] - profile["startValue"]
        assert all(0 <= row < len(frames) for sample in profile["samples"] for row in sample)


def stacks(document, profile=0):
    names = [frame["name"] for frame in document["shared"]["frames"]]
    chosen = document["profiles"][profile]
    return {
        tuple(names[row] for row in sample): weight
        for sample, weight in zip(chosen["samples"], chosen["weights"], strict=True)
    }


def test_live_bytes_at_the_peak_stand_under_their_stacks(tmp_path):
    speedscope.write(STACKED, tmp_path / "out.json", "a title")
    document = json.loads((tmp_path / "out.json").read_text())
    check(document)
    assert document["name"] == "a title"
    assert stacks(document) == {
        ("main", "inner"): 107,
        ("main", "other(int, char)"): 20,
        ("(no stack)", "unknown"): 40,
    }
    assert {"name": "inner", "file": "a.py", "line": 1} in document["shared"]["frames"]
    assert {"name": "other(int, char)"} in document["shared"]["frames"]


def test_what_lies_in_a_block_is_its_innermost_frame():
    """Of the three blocks of one stack that are alive, two hold the same tensor, and one is not known."""
    seen = replace(
        STACKED,
        tensors=(TensorMetadata("float32", (25,), (1,)),),
        events=replace(STACKED.events, tensor=np.array([0, -1, -1, -1, -1], np.int32)),
        start=replace(STACKED.start, tensor=np.array([0], np.int32)),
    )
    document = speedscope.document(seen, "t")
    check(document)
    assert stacks(document) == {
        ("main", "inner", "float32 [25]"): 100,
        ("main", "inner"): 7,
        ("main", "other(int, char)"): 20,
        ("(no stack)", "unknown", "float32 [25]"): 40,
    }


def test_a_block_without_a_stack_stands_under_its_modules_and_operator():
    document = speedscope.document(trace("alloc 9 a module=net.conv operator=aten::mm category=input"), "t")
    check(document)
    assert stacks(document) == {("(no stack)", "net", "net.conv", "aten::mm", "input"): 9}


def test_every_device_has_a_profile_and_the_fullest_is_shown():
    document = speedscope.document(trace("alloc 9 a", "alloc 50 b device=cuda:0", "alloc 1 c"), "t")
    check(document)
    assert [profile["endValue"] for profile in document["profiles"]] == [10, 50]
    assert document["activeProfileIndex"] == 1


def test_an_empty_trace_has_no_profile():
    document = speedscope.document(trace(), "t")
    check(document)
    assert document["profiles"] == []
