"""Divisions by what an allocator's record tells: stack, line, context, pool, stream."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tb_memplugin.analysis.curves import OTHERS, SHOWN_MODULES, profile_over_time
from tb_memplugin.analysis.divisions import ALL_DIVISIONS, breakdown
from tb_memplugin.analysis.rules import read_rules
from tb_memplugin.trace import TensorMetadata
from tests.recorded_program import program
from tests.traces import trace

STACKS = {"a": ("f a.py:1", "main a.py:9"), "b": ("g b.py:2", "main a.py:9")}
PROGRAM = program(
    "before 1 w at=a pool=1",
    "alloc 2 x at=b context=0/0",
    "alloc 4 y at=a stream=1",
    "alloc 8 z",
    "free x",
    "alloc 16 v at=b pool=-1 stream=-1",
    stacks=STACKS,
)


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        ("stack", {"g b.py:2\nmain a.py:9": 2, "f a.py:1\nmain a.py:9": 5, "(no stack)": 8}),
        ("line", {"b.py:2 (g)": 2, "a.py:1 (f)": 5, "(no stack)": 8}),
        ("context", {"0/0": 2, "(none)": 12, "(before the window)": 1}),
        ("pool", {"default": 14, "private (7, 1)": 1}),
        ("stream", {"default stream": 11, "stream 0xabc0": 4}),
        (read_rules(["late=b.py"]), {"late": 2, "unknown": 13}),
    ],
)
def test_a_moment_is_divided(by, expected):
    assert {part.key: part.bytes for part in breakdown(PROGRAM, 0, 2, by)} == expected


def test_what_is_not_known_is_said():
    pools = {part.key: part.bytes for part in breakdown(PROGRAM, 0, 4, "pool")}
    streams = {part.key: part.bytes for part in breakdown(PROGRAM, 0, 4, "stream")}
    assert pools == {"default": 12, "private (7, 1)": 1, "(not known)": 16}
    assert streams == {"default stream": 9, "stream 0xabc0": 4, "(not known)": 16}


@pytest.mark.parametrize("by", [*ALL_DIVISIONS, read_rules(["f=a.py", "g=b.py"])])
def test_every_division_sums_to_the_whole_at_every_moment_and_over_time(by):
    live = PROGRAM.live(0)
    for event in range(-1, len(PROGRAM.events)):
        assert sum(part.bytes for part in breakdown(PROGRAM, 0, event, by)) == live[event + 1]
    drawn = profile_over_time(PROGRAM, 0, by, 7)
    assert np.array_equal(drawn.stacks.sum(axis=0), drawn.high)
    assert drawn.peak_bytes == live.max() == 29


def test_over_time_the_largest_have_bands_and_the_others_share_one():
    stacks = {f"s{row}": (f"f a.py:{row}",) for row in range(SHOWN_MODULES + 3)}
    many = program(*(f"alloc {row + 1} b{row} at=s{row}" for row in range(SHOWN_MODULES + 3)), stacks=stacks)
    drawn = profile_over_time(many, 0, "line", 5)
    assert len(drawn.keys) == SHOWN_MODULES + 1
    assert drawn.stacks[drawn.keys.index(OTHERS), -1] == 1 + 2 + 3


def test_a_profile_by_rules_has_all_of_them():
    names = [f"r{row}" for row in range(SHOWN_MODULES + 3)]
    stacks = {name: (f"{name} a.py:1",) for name in names}
    many = program(*(f"alloc 1 b{name} at={name}" for name in names), stacks=stacks)
    drawn = profile_over_time(many, 0, read_rules([f"{name}=^{name}$" for name in names]), 5)
    assert list(drawn.keys) == names


def test_a_trace_without_events_has_a_profile():
    drawn = profile_over_time(program("before 5 w"), 0, "category", 3)
    assert drawn.high.tolist() == [5, 5, 5]


def test_bytes_by_dtype_and_by_label_have_a_row_for_what_is_not_known():
    recorded = trace(
        "start 40 w label=weight", "alloc 8 a label=weight", "alloc 2 b", "alloc 1 c label=other"
    )
    half, full = TensorMetadata("float16", (20,), (1,)), TensorMetadata("float32", (2,), (1,))
    recorded = replace(
        recorded,
        tensors=(half, full, TensorMetadata("float16", (1,), (1,))),
        start=replace(recorded.start, tensor=np.array([0], np.int32)),
        events=replace(recorded.events, tensor=np.array([1, 2, -1], np.int32)),
    )
    by_dtype = {part.key: (part.bytes, part.count) for part in breakdown(recorded, 0, 2, "dtype")}
    assert by_dtype == {"float16": (42, 2), "float32": (8, 1), "(not known)": (1, 1)}
    by_label = {part.key: (part.bytes, part.count) for part in breakdown(recorded, 0, 2, "label")}
    assert by_label == {"weight": (48, 2), "(none)": (2, 1), "other": (1, 1)}
