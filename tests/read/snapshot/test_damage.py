"""Snapshots that contradict themselves are told; what is no snapshot is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.read.snapshot import tables
from tb_memplugin.read.snapshot.trace import trace_from_snapshot
from tests.snapshots import block, entries, segment, snapshot


@pytest.mark.parametrize(
    ("lines", "blocks", "told"),
    [
        (["alloc 1000 1", "alloc 1000 2"], [block(1000, 2)], "1 allocations at an address where"),
        (["alloc 1000 1"], [], "1 allocations neither freed nor among the final blocks (1 bytes)."),
        (
            ["free_completed 1000 1", "free_completed 1000 1"],
            [],
            "1 frees of blocks that were not live (1 bytes).",
        ),
        (
            ["free_completed 1000 1"],
            [block(1000, 1)],
            "1 final blocks that were freed and not allocated again (1 bytes).",
        ),
        (
            ["alloc 1000 1", "free_completed 1000 9"],
            [],
            "1 blocks whose size changed between allocation and end (8 bytes).",
        ),
        (["alloc 1000 -5", "free_completed 1000 0"], [], "1 sizes are negative; counted as 0 (5 bytes)."),
        (
            ["alloc 1000 1 50", "free_completed 1000 1 40"],
            [],
            "1 entries are earlier than the one before; moved to its time (1 bytes).",
        ),
        (
            ["segment_unmap 1 50", "segment_map 1 50", "segment_map 1 9"],
            [],
            "below zero after 2 entries, by up to 59 bytes",
        ),
        (
            ["segment_free 9000 100", "segment_alloc 9000 100", "alloc 1000 700", "free_completed 1000 700"],
            [block(1000, 1, "inactive", 500)],
            "after 1 entries, more is live than reserved, by up to 188 bytes",
        ),
        (["teleport 1000 1"], [], "1 entries have the unknown action 'teleport'; kept as marks (1 bytes)."),
        ([], [block(1000, 1), block(1100, 1)], "1 live blocks overlap (412 bytes)."),
        ([], [block(1000, 1, "melting")], "1 blocks are in an unknown state; taken as free (512 bytes)."),
        ([], [block(1000, -1)], "1 live blocks have a negative size; counted as 0 (1 bytes)."),
    ],
)
def test_contradictions_are_counted_and_told(
    lines: list[str], blocks: list[dict[str, Any]], told: str
) -> None:
    segments = [segment(*blocks, total=512)] if blocks else []
    trace = trace_from_snapshot(snapshot(segments, entries(*lines)), "x")
    assert any(told in note for note in trace.notes)


def test_a_segment_that_disagrees_with_its_blocks_is_told() -> None:
    trace = trace_from_snapshot([{**segment(block(1000, 5)), "requested_size": 6}], "x")
    assert any("do not have the sum" in note for note in trace.notes)


WHOLE = {"total_size": 1024, "allocated_size": 512, "active_size": 1024}


def whole_segment(**changed: Any) -> dict[str, Any]:
    """A segment that tells its sums, as PyTorch does: a live block and one that waits for a stream."""
    blocks = [block(1000, 5), block(1512, 6, "active_pending_free")]
    return {**segment(*blocks), **WHOLE, **changed}


def test_a_segment_that_its_blocks_fill_is_sound() -> None:
    trace = trace_from_snapshot([whole_segment()], "x")
    assert [note for note in trace.notes if note.startswith("cuda:0")] == []


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"total_size": 2048}, "1 segments are not completely filled by their blocks (1,024 bytes)."),
        ({"address": 488}, "1 segments are not completely filled by their blocks (1,024 bytes)."),
        (
            {"blocks": [block(1000, 5), block(1600, 6, "active_pending_free")]},
            "not completely filled by their blocks (176 bytes).",
        ),
        ({"active_size": 512}, "do not have the sums of their blocks' sizes (512 bytes)."),
        ({"allocated_size": 1024}, "do not have the sums of their blocks' sizes (512 bytes)."),
    ],
)
def test_a_segment_that_tells_other_sums_than_its_blocks_is_told(changed: dict[str, Any], told: str) -> None:
    trace = trace_from_snapshot([whole_segment(**changed)], "x")
    assert any(told in note for note in trace.notes)


@pytest.mark.parametrize(("address", "size"), [((1 << 64) - 512, 1024), (1000, -512), (1000, -5000)])
def test_a_segment_that_ends_where_no_memory_is_is_refused(address: int, size: int) -> None:
    beyond = {**segment(total=size), "address": address}
    with pytest.raises(UnreadableFileError, match="negative size, or ends beyond"):
        trace_from_snapshot(snapshot([beyond]), "x")


@pytest.mark.parametrize("size", ["512", 1 << 64, None, True, 512.0])
def test_a_block_of_no_possible_size_is_refused_before_it_is_added_up(size: object) -> None:
    for field in ("size", "requested_size", "address"):
        if (field, size) != ("requested_size", None):
            with pytest.raises(UnreadableFileError, match=r"address( of a block)? (is|has)"):
                trace_from_snapshot([segment({**block(1000, 1), field: size})], "x")


def test_of_many_unknown_actions_some_are_told_by_name_and_the_others_counted() -> None:
    trace = trace_from_snapshot(snapshot([], entries(*(f"act{row:03} 1 1" for row in range(200)))), "x")
    assert len(trace.notes) == 6
    assert "1 entries have the unknown action 'act004'; kept as marks" in trace.notes[4]
    assert "195 entries have other unknown actions; kept as marks (195 bytes)." in trace.notes[5]


def test_frames_that_share_a_long_name_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MOST_CHARACTERS", 10_000)
    name = "f" * 1000
    rows = entries(*(f"alloc {512 * row} 1" for row in range(1, 21)))
    for row in rows:
        row["frames"] = [{"name": name, "filename": "a.py", "line": 1}]
    assert len(trace_from_snapshot(snapshot([], rows), "x").stacks) == 1
    for number, row in enumerate(rows):
        row["frames"] = [{"name": name, "filename": "a.py", "line": number}]
    with pytest.raises(UnreadableFileError, match="more text than any program has"):
        trace_from_snapshot(snapshot([], rows), "x")


@pytest.mark.parametrize(
    ("field", "frame"),
    [("frames", {"name": "f", "filename": "a.py", "line": 1}), ("forward_frames", "f a.py:1")],
)
def test_a_stack_deeper_than_any_is_refused(field: str, frame: object) -> None:
    rows = [{**entries("alloc 1000 1")[0], field: [frame] * ((1 << 17) + 1)}]
    with pytest.raises(UnreadableFileError, match="a stack has 131,073 frames"):
        trace_from_snapshot(snapshot([], rows), "x")


def test_names_beyond_all_measure_are_cut_and_told() -> None:
    rows = entries("alloc 1000 1", "alloc 2000 1")
    rows[0].update(user_metadata="x" * 5000, compile_context="0/0")
    mark = {"name": "y" * 4097, "stage": "START", "device": 0, "time_us": 1}
    content = {**snapshot([], rows), "external_annotations": [mark]}
    trace = trace_from_snapshot(content, "x")
    assert trace.labels == ("x" * 4095 + "…",)
    assert trace.annotation_names == ("y" * 4095 + "…",)
    assert any(note.startswith("2 labels, compile contexts or names") for note in trace.notes)


@pytest.mark.parametrize(
    "content", [None, 3, "text", {}, {"a": 1}, {"segments": [], "device_traces": 3}, [3], [{}]]
)
def test_what_is_no_snapshot_is_refused(content: object) -> None:
    with pytest.raises(UnreadableFileError):
        trace_from_snapshot(content, "x")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("size", "12"),
        ("size", 1.5),
        ("size", 1 << 70),
        ("size", 1 << 62),
        ("addr", None),
        ("addr", 1 << 65),
        ("action", []),
        ("time_us", 1 << 60),
        ("time_us", "now"),
        ("frames", 3),
        ("frames", [{"name": "f"}]),
        ("frames", "text"),
        ("user_metadata", 3),
        ("user_metadata", []),
    ],
)
def test_a_field_of_a_wrong_type_is_refused(field: str, value: object) -> None:
    written = entries("alloc 1000 1", "free_completed 1000 1")
    written[0][field] = value
    with pytest.raises(UnreadableFileError, match="trace entries of cuda:0"):
        trace_from_snapshot(snapshot([], written), "x")
    del written[0][field]
    if field in ("size", "addr", "action"):
        with pytest.raises(UnreadableFileError, match=f"KeyError: '{field}'"):
            trace_from_snapshot(snapshot([], written), "x")


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("size", 1.5, "size is float, not a whole number"),
        ("time_us", "now", "time_us is str, not a whole number"),
        ("addr", 1 << 65, "addr has more than 64 bits"),
        ("stream", 1 << 65, "stream has more than 64 bits"),
        ("pool_id", (0, "a"), "a pool id is str, not a whole number"),
    ],
)
def test_the_message_names_the_field_that_is_no_number(field: str, value: object, told: str) -> None:
    written = entries("alloc 1000 1")
    written[0][field] = value
    with pytest.raises(UnreadableFileError, match=told):
        trace_from_snapshot(snapshot([], written), "x")


def without_end(kind: type = tuple) -> Any:
    """A pair of one pair, and so on, 60 deep: to hash, compare or print it takes for ever."""
    value = kind()
    for _ in range(60):
        value = kind((value, value))
    return value


@pytest.mark.parametrize("kind", [tuple, list])
@pytest.mark.parametrize(
    "field", ["action", "user_metadata", "compile_context", "stream", "pool_id", "frames", "forward_frames"]
)
def test_a_value_without_end_is_refused_before_it_is_hashed_or_printed(field: str, kind: type) -> None:
    written = entries("alloc 1000 1")
    for value in (without_end(kind), [without_end(kind), without_end(kind)]):
        written[0][field] = value
        with pytest.raises(UnreadableFileError):
            trace_from_snapshot(snapshot([], written), "x")
    written[0].pop(field)
    written[0].update(entries("alloc 1000 1")[0], frames=[{"name": without_end(kind)}])
    with pytest.raises(UnreadableFileError, match="frame"):
        trace_from_snapshot(snapshot([], written), "x")


def test_a_block_in_a_state_without_end_is_refused() -> None:
    for field in ("state", "frames"):
        with pytest.raises(UnreadableFileError):
            trace_from_snapshot([segment({**block(1000, 1), field: without_end()})], "x")
    with pytest.raises(UnreadableFileError, match="device of a segment"):
        trace_from_snapshot([{**segment(block(1000, 1)), "device": without_end()}], "x")


def test_more_streams_than_any_program_has_are_refused() -> None:
    """Python's dicts can be made slow by numbers chosen for that."""
    rows = [{**entries("alloc 1000 1")[0], "stream": 7 * row} for row in range(1 << 15)]
    with pytest.raises(UnreadableFileError, match="different streams"):
        trace_from_snapshot(snapshot([], rows), "x")


def test_a_stack_that_many_entries_share_is_read_once() -> None:
    shared = ["f"] * 100_000
    rows = [{**entries(f"alloc {512 * row} 1")[0], "forward_frames": shared} for row in range(5000)]
    trace = trace_from_snapshot(snapshot([], rows), "x")
    assert len(trace.stacks) == 1
    assert set(trace.events.forward.tolist()) == {0}
