"""Annotations: nested ranges, stages, and which one a block was born in."""

from __future__ import annotations

import pytest

from tb_memplugin.analysis.annotations import annotation_ranges, stages
from tb_memplugin.analysis.divisions import breakdown
from tb_memplugin.errors import NotRecordedError
from tests.recorded_program import program
from tests.traces import EPOCH, MICROSECOND

STEPS = program(
    "before 1 w",
    "alloc 2 a",
    "START step",
    "alloc 4 b",
    "START inner",
    "alloc 8 c",
    "END inner",
    "alloc 16 d",
    "END step",
    "free c",
    "START step",
    "alloc 32 e",
)
END = len(STEPS.events) - 1


def by_annotation(trace, device=0):
    return {part.key: part.bytes for part in breakdown(trace, device, len(trace.events) - 1, "annotation")}


def test_a_block_belongs_to_the_innermost_annotation_that_was_open_at_its_birth():
    assert by_annotation(STEPS) == {"step": 4 + 16 + 32, "(none)": 2, "(before the window)": 1}
    at_c = {part.key: part.bytes for part in breakdown(STEPS, 0, 2, "annotation")}
    assert at_c == {"inner": 8, "step": 4, "(none)": 2, "(before the window)": 1}


def test_ranges_are_nested():
    found = annotation_ranges(STEPS, 0)
    assert [(each.name, each.depth, each.parent, each.start_event, each.end_event) for each in found] == [
        ("step", 0, -1, 0, 3),
        ("inner", 1, 0, 1, 2),
        ("step", 0, -1, 4, None),
    ]
    half = MICROSECOND // 2
    assert (found[1].start_ns, found[1].end_ns) == (
        EPOCH + 2 * MICROSECOND - half,
        EPOCH + 3 * MICROSECOND - half,
    )


def test_ranges_that_do_not_nest_end_by_name():
    crossed = program("START a", "START b", "alloc 1 x", "END a", "alloc 2 y", "END b", "alloc 4 z")
    assert by_annotation(crossed) == {"b": 3, "(none)": 4}
    assert [(each.name, each.depth, each.end_event) for each in annotation_ranges(crossed, 0)] == [
        ("a", 0, 0),
        ("b", 1, 1),
    ]


def test_an_end_alone_was_open_from_the_beginning():
    late = program("alloc 1 x", "END inner", "alloc 2 y", "END outer", "alloc 4 z")
    assert by_annotation(late) == {"inner": 1, "outer": 2, "(none)": 4}
    assert [(each.name, each.start_ns, each.depth, each.parent) for each in annotation_ranges(late, 0)] == [
        ("outer", None, 0, -1),
        ("inner", None, 1, 0),
    ]


def test_devices_have_their_own_annotations():
    two = program(
        "START a device=1", "alloc 1 x", "alloc 2 y device=1", "END a device=1", "alloc 4 z device=1"
    )
    assert by_annotation(two, 0) == {"(none)": 1}
    assert by_annotation(two, 1) == {"a": 2, "(none)": 4}
    assert [(stage.device, stage.bytes) for stage in stages(two)] == [("cuda:1", 0), ("cuda:1", 2)]


def test_a_hundred_thousand_open_ranges_take_no_time_at_all():
    count = 100_000
    many = program(*["START a"] * 10, *["END a"] * 10)
    written = many.annotations
    columns = {name: getattr(written, name).repeat(count // 10) for name in written.__slots__}
    wide = type(many)(**{**vars(many), "annotations": type(written)(**columns)})
    assert max(each.depth for each in annotation_ranges(wide, 0)) == count - 1


def test_stages_tell_what_was_alive_at_each_start_and_end():
    found = stages(STEPS)
    assert [(stage.key, stage.event, stage.bytes) for stage in found] == [
        ("step_START", 0, 3),
        ("inner_START", 1, 7),
        ("inner_END", 2, 15),
        ("step_END", 3, 31),
        ("step_START(1)", 4, 23),
    ]
    assert [stage.key for stage in stages(STEPS, ["inner"])] == ["inner_START", "inner_END"]


def test_a_name_without_annotation_is_refused_with_those_that_there_are():
    with pytest.raises(NotRecordedError, match="step, inner"):
        stages(STEPS, ["Step"])
    assert stages(program("alloc 1 a")) == ()
