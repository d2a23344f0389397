"""Beside Mosaic: what it answers on real snapshots is ours too where it is right, and where not, why not.

Its answers (2026-04, by its own code) stand beside the snapshots. It looks at the first device alone and
starts from zero, so it is right of what came in the window.
"""

from __future__ import annotations

import json
import pickle
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tb_memplugin.analysis.allocations import usage
from tb_memplugin.analysis.annotations import stages
from tb_memplugin.analysis.comparison import compare
from tb_memplugin.analysis.curves import profile_over_time
from tb_memplugin.analysis.divisions import NONE, By, breakdown
from tb_memplugin.analysis.moments import Moment, events_between, peak
from tb_memplugin.analysis.rules import Rules, read_rules
from tb_memplugin.analysis.stacks import StackRow, stack_table
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.frames import read_frame
from tests.snapshots import load_snapshot

DATA = Path(__file__).parents[2] / "shared" / "data"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason=f"{DATA} holds strangers' snapshots; it is absent")

RULES = read_rules(["Forward=.*forward.*", "Optimizer=.*(optim|adam).*", "Backward=.*backward.*"])
RIGHT = ["01", "20", "23"]
"""What it is right of: recorded from the process's start (23 is made up, with 466 bytes from before)."""


@cache
def answers(number: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DATA / "mosaic_numbers.json").read_text())[number]
    return found


@cache
def loaded(number: str) -> MemoryTrace:
    return load_snapshot(path_of(number))


def path_of(number: str) -> Path:
    return next((DATA / "snapshots").glob(f"{number}_*"))


def top(number: str) -> Moment:
    """The peak of the first device."""
    return peak(loaded(number), loaded(number).devices[0].name)


def came_in_window(number: str, by: By | Rules, event: int) -> dict[str, int]:
    """Parts of the first device at an event, without what was there before the trace."""
    trace = loaded(number)
    started = {part.key: part.bytes for part in breakdown(trace, 0, -1, by)}
    kept = trace.allocations.born[trace.allocations.alive_at(event, 0)] < 0
    assert kept.sum() == len(trace.allocations.alive_at(-1, 0)), "nothing of the start was freed by then"
    parts = {part.key: part.bytes for part in breakdown(trace, 0, event, by)}
    return {key: size - started.get(key, 0) for key, size in parts.items() if size - started.get(key, 0)}


def theirs(number: str, profile: str) -> dict[str, int]:
    """The sums of a profile at their peak, under our names for nothing; they keep keys with 0 bytes."""
    (sums,) = answers(number)[f"profile_{profile}"]["sums"].values()
    ours = {"": NONE, "N/A": NONE}
    return {ours.get(key, key): int(size) for key, size in sums.items() if size}


@pytest.mark.parametrize("number", RIGHT)
def test_the_peak_is_the_same(number):
    before = int(loaded(number).live(0)[0])
    assert top(number).bytes - before == answers(number)["peak"]["dynamic_bytes"]
    assert before == {"23": 466}.get(number, 0)


STATIC_23 = 466
"""What was alive at the start of its own test file; Mosaic leaves it out."""


def test_the_peak_within_times_is_that_of_its_own_test():
    trace = loaded("23")
    found = peak(trace, within=events_between(trace, 1759252605604106_000, 1759252631649942_999))
    assert found.bytes - STATIC_23 == 202846821
    assert trace.events.address[found.event] == 0x231DF1F389C4C


def test_the_peak_and_the_use_up_to_an_allocation_are_those_of_its_own_test():
    trace = loaded("23")
    at = usage(trace, 0x32FA0599C7F59, 0, "free")
    assert at.bytes_after - STATIC_23 == 400913725
    assert peak(trace, within=(0, at.event)).bytes - STATIC_23 == 577984171
    assert usage(trace, 0x2263C194BDA7, 0, "free").bytes_after - STATIC_23 == 1783600757


@pytest.mark.parametrize("number", ["01", "23"])
def test_the_stacks_at_the_peak_are_the_same(number):
    rows = [row for row in stack_table(loaded(number), 0, top(number).event) if row.frames]
    expected = answers(number)["stacks_at_peak"]
    assert summed(rows) == (expected["count"], expected["calls"], expected["bytes"])
    assert [[row.calls, row.bytes] for row in rows[:10]] == expected["top10_calls_bytes"]


@pytest.mark.parametrize(
    ("profile", "by"), [("annotations", "annotation"), ("compile_context", "context"), ("custom", RULES)]
)
@pytest.mark.parametrize("number", RIGHT)
def test_a_profile_has_the_same_sums_at_the_peak(number, profile, by):
    assert came_in_window(number, by, top(number).event) == theirs(number, profile)


@pytest.mark.parametrize("number", RIGHT)
def test_categories_have_other_names_and_the_same_sum(number):
    assert sum(came_in_window(number, "category", top(number).event).values()) == sum(
        theirs(number, "categories").values()
    )


@pytest.mark.parametrize("number", RIGHT)
def test_a_profile_over_time_reaches_the_same_maximum(number):
    before = int(loaded(number).live(0)[0])
    divisions: dict[str, By | Rules] = {
        "annotations": "annotation",
        "categories": "category",
        "custom": RULES,
    }
    for profile, by in divisions.items():
        drawn = profile_over_time(loaded(number), 0, by, 500)
        assert (
            drawn.stacks.sum(axis=0).max() - before
            == answers(number)[f"profile_{profile}"]["max_total_bytes"]
        )


@pytest.mark.parametrize("number", RIGHT)
def test_annotation_stages_have_the_same_keys_and_bytes(number):
    before = int(loaded(number).live(0)[0])
    found = {stage.key: stage.bytes - before for stage in stages(loaded(number)) if stage.device == "cuda:0"}
    assert found == answers(number)["annotation_stages"]


def test_a_stack_is_its_functions_too_not_only_its_places():
    """It names a frame by file and line, and native code has neither: `neg` and `mul` fall into one row."""
    rows = stack_table(loaded("20"), 0, top("20").event)
    expected = answers("20")["stacks_at_peak"]
    assert (len(rows), expected["count"]) == (15, 14)
    places: defaultdict[tuple[tuple[str, int], ...], list[int]] = defaultdict(lambda: [0, 0])
    for row in rows:
        merged = places[tuple(read_frame(text)[1:3] for text in row.frames)]
        merged[0] += row.calls
        merged[1] += row.bytes
    assert sorted(places.values(), key=lambda row: -row[1])[:10] == expected["top10_calls_bytes"]
    assert summed(rows)[1:] == (expected["calls"], expected["bytes"])


@pytest.mark.parametrize(("number", "true_start"), [("03", 5095403520), ("07", 13696976896), ("12", 8771952)])
def test_what_was_alive_at_the_start_counts(number, true_start):
    """It starts from zero; the final state in the segments, rewound, says what was there (rule 2)."""
    trace = loaded(number)
    dynamic = answers(number)["peak"]["dynamic_bytes"]
    assert trace.live(0)[0] == true_start
    assert top(number).bytes > dynamic
    assert trace.live(0)[-1] == sum(segment["requested_size"] for segment in written(number)["segments"])
    # Without the start state our numbers are its numbers: that is all that it misses.
    assert max(from_zero(number)) == dynamic


def test_its_peak_is_at_another_moment_where_the_start_was_freed_meanwhile():
    levels = from_zero("03")
    place = levels.index(max(levels))
    assert top("03").event == 2780, "the first of the two events after which it holds"
    assert place > 2781
    assert loaded("03").live(0)[place + 1] < top("03").bytes


def test_stages_count_the_start_too():
    for number in ("03", "07"):
        levels = from_zero(number)
        for stage in stages(loaded(number)):
            assert answers(number)["annotation_stages"][stage.key] == (
                levels[stage.event] if stage.event >= 0 else 0
            )
            assert stage.bytes == loaded(number).live(0)[stage.event + 1]


def test_a_snapshot_without_annotations_has_no_stages():
    assert answers("12")["annotation_stages"] == "KeyError('external_annotations')"
    assert stages(loaded("12")) == ()


def test_each_device_has_its_own_blocks():
    """The "static" bytes that it adds to the first device's are the other devices', at rounded sizes."""
    trace = loaded("01")
    live = [
        (s["device"], b) for s in written("01")["segments"] for b in s["blocks"] if b["state"] != "inactive"
    ]
    assert answers("01")["peak"]["static_bytes"] == sum(block["size"] for device, block in live if device)
    assert trace.live(trace.device_row("cuda:0"))[0] == 0, "nothing was there before"
    assert peak(trace).bytes == peak(trace, "cuda:1").bytes == 84063351764, "the one that ran out of memory"


@pytest.mark.parametrize("number", ["07", "12"])
def test_requested_and_rounded_bytes_are_not_added(number):
    """Its static bytes are rounded, its dynamic ones requested. Ours are requested, on both sides."""
    static, start = answers(number)["peak"]["static_bytes"], int(loaded(number).live(0)[0])
    assert static % 512 == 0
    assert start < static, "rounding up is all that it differs by"
    assert (static - start) / static < 0.02


def test_the_difference_of_two_snapshots_sums_to_the_difference_of_their_peaks():
    base, other = loaded("20"), loaded("12")
    (found,) = compare(base, other, by="stack")
    told = json.loads((DATA / "mosaic_numbers.json").read_text())["diff base=20 other=12"]
    added = [row for row in found.rows if row.status == "added" and row.key != "(no stack)"]
    assert (len(added), sum(row.other_bytes for row in added)) == tuple(told.values())
    assert sum(row.delta_bytes for row in found.rows) == top("12").bytes - top("20").bytes


def summed(rows: Iterable[StackRow]) -> tuple[int, int, int]:
    rows = list(rows)
    return len(rows), sum(row.calls for row in rows), sum(row.bytes for row in rows)


@cache
def written(number: str) -> dict[str, Any]:
    found: dict[str, Any] = pickle.loads(path_of(number).read_bytes())
    return found


@cache
def from_zero(number: str) -> list[int]:
    """What a tool that starts from zero counts after each entry of the first device."""
    level, live, levels = 0, {}, []
    for entry in written(number)["device_traces"][0]:
        if entry["action"] == "alloc":
            live[entry["addr"]] = entry["size"]
            level += entry["size"]
        elif entry["action"] == "free_completed":
            level -= live.pop(entry["addr"], 0)
        levels.append(level)
    return levels
