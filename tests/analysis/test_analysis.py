"""Peaks, steps, parts, curves and module tables of traces that a person can add up."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tb_memplugin.analysis.comparison import compare_parts
from tb_memplugin.analysis.curves import curve, event_curve
from tb_memplugin.analysis.divisions import DIVISIONS, breakdown
from tb_memplugin.analysis.modules import module_table
from tb_memplugin.analysis.moments import moment, peak
from tb_memplugin.analysis.steps import step_stats
from tb_memplugin.errors import MemPluginError, NotRecordedError
from tb_memplugin.trace import Category, MemoryTrace
from tests.traces import EPOCH, MICROSECOND, trace

TRAINING = (
    "start 400 w category=parameter module=net.fc",
    "step 1",
    "alloc 100 x category=input",
    "alloc 200 h category=activation module=net.fc phase=forward operator=aten::linear",
    "alloc 50 t category=temporary module=net phase=forward",
    "free t",
    "alloc 400 g category=gradient module=net.fc phase=backward",
    "free h",
    "step 2",
    "alloc 300 h2 category=activation module=net.fc phase=forward",
    "free h2",
    "free g",
)


@pytest.fixture(scope="module")
def training() -> MemoryTrace:
    return trace(*TRAINING)


def test_a_step_tells_its_peak_start_end_and_what_it_left(training):
    first, second = step_stats(training, 0)
    assert (first.peak_bytes, first.start_bytes, first.entry_bytes, first.end_bytes) == (1100, 400, 400, 900)
    assert (first.allocated_bytes, first.allocations, first.stayed_bytes, first.stayed) == (750, 4, 500, 2)
    assert (second.peak_bytes, second.start_bytes, second.entry_bytes, second.end_bytes) == (
        1200,
        400,
        900,
        500,
    )
    assert (second.window_peak_bytes, first.window_peak_bytes) == (800, 700)


def test_a_peak_at_the_very_start_of_a_step_is_seen():
    found = trace("start 100 w", "step 1", "alloc 10 a", "free a", "free w")
    other = trace("alloc 100 a", "step 1", "free a")
    assert step_stats(found, 0)[0].peak_bytes == 110
    assert step_stats(other, 0)[-1].peak_bytes == 100


def test_the_peak_of_the_window_is_the_highest_of_its_steps(training):
    top = peak(training)
    assert (top.bytes, top.step, top.phase.key, top.module) == (1200, 2, "forward", "net.fc")
    assert peak(training, step=1).bytes == 1100
    assert {part.key: part.bytes for part in top.parts("category")} == {
        "parameter": 400,
        "gradient": 400,
        "activation": 300,
        "input": 100,
    }


def test_parts_come_largest_first_and_modules_are_divided_again(training):
    fc, *rest = peak(training).parts("module")
    assert (fc.key, fc.bytes, fc.count) == ("net.fc", 1100, 3)
    assert fc.categories == {"parameter": 400, "gradient": 400, "activation": 300}
    assert sum(part.bytes for part in rest) == 100


def test_an_unknown_division_names_the_known_ones(training):
    with pytest.raises(MemPluginError, match="category, module, operator, phase"):
        breakdown(training, 0, 0, "colour")  # type: ignore[arg-type]


def test_a_trace_without_devices_has_no_peak(training):
    with pytest.raises(NotRecordedError, match="profile_memory"):
        peak(MemoryTrace("test", training.events, training.start, (), training.steps))


def test_the_largest_alive_come_first_with_their_times(training):
    first, second, *_ = peak(training, largest=2).largest
    assert {first.category, second.category} == {Category.PARAMETER, Category.GRADIENT}
    parameter = first if first.category is Category.PARAMETER else second
    assert (parameter.born_ns, parameter.freed_ns) == (None, None)


def test_comparison_names_what_was_added_removed_grown_and_shrunk():
    base = trace(
        "alloc 100 a module=gone", "alloc 50 b module=more", "alloc 70 c module=less", "alloc 5 d module=same"
    )
    other = trace(
        "alloc 80 b module=more", "alloc 60 c module=less", "alloc 5 d module=same", "alloc 9 e module=new"
    )
    rows = compare_parts(peak(base).parts("module"), peak(other).parts("module"))
    assert {row.key: (row.status, row.delta_bytes) for row in rows} == {
        "gone": ("removed", -100),
        "more": ("grown", 30),
        "less": ("shrunk", -10),
        "new": ("added", 9),
        "same": ("same", 0),
    }
    assert [row.key for row in rows][:2] == ["gone", "more"]
    assert sum(row.delta_bytes for row in rows) == peak(other).bytes - peak(base).bytes


def test_what_was_there_before_is_the_lowest_phase_of_a_curve():
    found = trace("start 10 w", "alloc 5 a phase=forward", "alloc 3 b")
    drawn = curve(found, 0, EPOCH, EPOCH + 2 * MICROSECOND, 1, "phase")
    assert (drawn.keys, drawn.stacks[:, 0].tolist()) == (("before", "other", "forward"), [10, 3, 5])


def test_a_curve_keeps_the_peak_however_few_columns_there_are(training):
    drawn = curve(training, 0, EPOCH, EPOCH + 11 * MICROSECOND, 1)
    assert (drawn.high.tolist(), drawn.low.tolist(), drawn.peak_bytes) == ([1200], [400], 1200)


def test_a_column_without_events_repeats_the_state_before_it():
    found = trace("alloc 10 a", "alloc 20 b")
    drawn = curve(found, 0, EPOCH, EPOCH + 2 * MICROSECOND, 8)
    assert drawn.high.tolist() == [0, 0, 10, 10, 10, 10, 30, 30]
    assert drawn.low.tolist() == [0, 0, 0, 10, 10, 10, 10, 30]


def test_the_module_table_adds_up_along_the_tree(training):
    top = peak(training, step=2)
    table = module_table(training, 0, 1, top.event, with_highest=True)
    rows = {training.modules[row].key if row >= 0 else "": place for place, row in enumerate(table.rows)}
    assert table.inclusive[table.parent < 0].sum() == 1200
    fc = rows["net.fc"]
    assert table.own[fc, Category.ACTIVATION] == 300
    assert table.highest is not None
    assert table.highest[fc].sum() == 1100


def test_highest_is_one_moment_of_each_module_and_its_parts_sum_to_it():
    found = trace(
        "alloc 100 a category=activation module=m.x",
        "alloc 30 b category=temporary module=m.y",
        "free a",
        "alloc 70 g category=gradient module=m.y",
        "alloc 5 h category=gradient module=m.x",
    )
    table = module_table(found, 0, 0, 3, with_highest=True)
    assert table.highest is not None
    assert table.highest_event is not None
    place = {found.modules[row].key: at for at, row in enumerate(table.rows.tolist()) if row >= 0}
    by_hand = {
        "m": (1, {Category.ACTIVATION: 100, Category.TEMPORARY: 30}),  # 130, and never the 200 of all maxima
        "m.x": (0, {Category.ACTIVATION: 100}),
        "m.y": (3, {Category.TEMPORARY: 30, Category.GRADIENT: 70}),
    }
    for key, (event, parts) in by_hand.items():
        row = table.highest[place[key]]
        assert table.highest_event[place[key]] == event
        assert {category: row[category] for category in Category if row[category]} == parts


def test_what_was_highest_in_a_call_names_the_outermost_such_call_of_each_phase():
    found = trace(
        "alloc 10 a module=net.fc",
        "alloc 20 b module=net.fc",
        "free b",
        "alloc 40 g module=net.fc",
        "free g",
        "alloc 3 h",
        calls=[
            ("net", 0, 2, "forward"),
            ("net.fc", 1, 2, "forward"),
            ("net.fc", 3, 4, "backward"),
            ("net.fc", 5, 5, "backward"),
        ],
    )
    table = module_table(found, 0, 0, 0)
    place = {found.modules[row].key: at for at, row in enumerate(table.rows.tolist()) if row >= 0}
    calls = [found.modules[row].key for row in found.calls.name.tolist()]
    net, fc = place["net"], place["net.fc"]
    assert table.inside[[net, fc]].tolist() == [[30, 50], [30, 50]]
    assert table.peak_inside[[net, fc]].tolist() == [50, 50]
    assert [calls[row] for row in table.inside_call[[net, fc]].ravel()] == [
        "net",
        "net.fc",
        "net.fc",
        "net.fc",
    ]
    start = found.calls.start_ns[table.inside_call[fc, 1]]
    assert found.events.time_ns[2] < start < found.events.time_ns[3]


def test_what_was_highest_in_a_call_of_a_later_step_is_of_that_step():
    found = trace(
        "step 1",
        "alloc 100 a module=net",
        "free a",
        "alloc 4 w module=net",
        "step 2",
        "alloc 10 b module=net.fc",
        "alloc 20 c module=net.fc",
        "free c",
        calls=[("net", 0, 2, "forward"), ("net", 3, 5, "forward"), ("net.fc", 4, 5, "forward")],
    )
    of_step = []
    for step in (0, 1):
        table = module_table(found, 0, step, found.step_events(step)[1] - 1)
        rows = {found.modules[row].key: at for at, row in enumerate(table.rows.tolist()) if row >= 0}
        of_step.append({key: table.inside[at].tolist() for key, at in rows.items()})
    assert of_step[0]["net"] == [100, -1]
    assert (of_step[1]["net"], of_step[1]["net.fc"]) == ([34, -1], [34, -1])


def test_a_containers_forward_time_is_that_of_what_is_just_inside():
    found = trace(
        "alloc 1 a module=net",
        "alloc 1 b module=net.list.0",
        "alloc 1 c module=net.list.0.fc",
        "alloc 1 d module=net.list.1",
        calls=[
            ("net", 0, 3, "forward"),
            ("net.list.0", 1, 2, "forward"),
            ("net.list.0.fc", 2, 2, "forward"),
            ("net.list.1", 3, 3, "forward"),
        ],
    )
    table = module_table(found, 0, 0, 3)
    time = {
        found.modules[row].key: int(ns)
        for row, ns in zip(table.rows, table.forward_ns, strict=True)
        if row >= 0
    }
    assert time["net.list"] == time["net.list.0"] + time["net.list.1"] <= time["net"]


blocks = st.lists(
    st.tuples(
        st.integers(0, 40),
        st.integers(1, 30),
        st.integers(1, 500),
        st.sampled_from(["a", "a.b", "a.c", "d"]),
        st.sampled_from(list(Category)),
    ),
    min_size=1,
    max_size=25,
)


@settings(deadline=None)
@given(blocks, st.integers(1, 60), st.integers(0, 40), st.integers(1, 60))
def test_parts_and_stacks_sum_to_the_live_bytes_at_every_moment(rows, columns, begin, length):
    timeline = sorted(
        [(start, 1, number) for number, (start, *_) in enumerate(rows)]
        + [(start + span, 0, number) for number, (start, span, *_) in enumerate(rows)]
    )
    lines = [
        f"alloc {rows[number][2]} n{number} module={rows[number][3]} category={rows[number][4].key}"
        if is_alloc
        else f"free n{number}"
        for _, is_alloc, number in timeline
    ]
    found = trace(*lines)
    for event in range(-1, len(found.events)):
        total = int(found.live(0)[event + 1])
        for by in DIVISIONS:
            assert sum(part.bytes for part in moment(found, 0, event).parts(by)) == total
    t0 = EPOCH + begin * MICROSECOND
    first, end = np.searchsorted(found.events.time_ns, (t0, t0 + length * MICROSECOND + 1))
    for by in ("category", "module", "phase"):
        drawn = curve(found, 0, t0, t0 + length * MICROSECOND, columns, by)
        assert np.array_equal(drawn.stacks.sum(axis=0), drawn.high)
        assert drawn.peak_bytes == found.live(0)[first : end + 1].max()
    table = module_table(found, 0, 0, len(found.events) // 2, with_highest=True)
    assert table.inclusive[table.parent < 0].sum() == found.live(0)[len(found.events) // 2 + 1]
    assert table.highest is not None
    assert (table.highest.sum(axis=1) >= table.inclusive.sum(axis=1)).all()
    assert table.highest_event is not None
    for place, event in enumerate(table.highest_event.tolist()):
        then = module_table(found, 0, 0, event)
        row = then.inclusive[then.rows == table.rows[place]]
        assert np.array_equal(row.sum(axis=0), table.highest[place])


@pytest.mark.parametrize("columns", [1, 3, 8, 50])
def test_a_curve_over_events_loses_no_peak_and_sums_to_it(columns):
    there = trace(*TRAINING)
    count = len(there.events)
    drawn = event_curve(there, 0, 0, count, columns)
    edges = [
        -(-count * column // columns) for column in range(columns + 1)
    ]  # the first event at or behind each
    live = there.live(0)
    assert drawn.high.tolist() == [live[a : b + 1].max() for a, b in pairwise(edges)]
    assert drawn.low.tolist() == [live[a : b + 1].min() for a, b in pairwise(edges)]
    assert drawn.stacks.sum(axis=0).tolist() == drawn.high.tolist()
    assert drawn.peak_bytes == live.max()


def test_a_release_happens_in_the_phase_that_ran_then():
    there = trace("alloc 10 a phase=forward", "free a", "alloc 5 b")
    longer = replace(there.phases, end_ns=there.phases.end_ns + 9 * MICROSECOND)
    at = replace(there, phases=longer)
    assert [moment(at, 0, event).phase.key for event in range(3)] == ["forward", "forward", "other"]
