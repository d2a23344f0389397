"""Single allocations: their search, order and lifetimes, the use at one, and bands of the largest."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tb_memplugin.analysis.allocations import (
    bands,
    divided_rest,
    in_order,
    rows_with_text,
    usage,
    versions,
)
from tb_memplugin.analysis.columns import event_cuts, time_cuts
from tb_memplugin.analysis.curves import curve
from tb_memplugin.analysis.divisions import informative
from tb_memplugin.errors import MemPluginError, NotRecordedError
from tests.recorded_program import program
from tests.traces import trace

PROGRAM = program(
    "before 400 w category=parameter",
    "alloc 100 a at=mlp",
    "free a",
    "alloc 50 a at=head",
    "alloc 9 n device=1",
    "free a",
    "alloc 70 a",
    stacks={"mlp": ("Mlp_forward model.py:20",), "head": ("head Model.py:40",)},
)
EVERY = np.arange(len(PROGRAM.allocations))
"""w, then a three times on cuda:0, with n of cuda:1 between."""


def bytes_found(text):
    return PROGRAM.allocations.bytes[rows_with_text(PROGRAM, EVERY, text, versions(PROGRAM))].tolist()


def test_versions_count_the_blocks_of_an_address():
    assert versions(PROGRAM).tolist() == [0, 0, 1, 0, 2]
    address = int(PROGRAM.allocations.address[1])
    assert usage(PROGRAM, address, 2).allocation.bytes == 70


def test_the_same_address_on_another_device_is_another_place():
    two = trace("alloc 1 a", "free a", "alloc 2 b device=cuda:0")
    two.allocations.address[:] = 4096
    assert versions(two).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("mlp", [100]),
        ("MODEL.PY", [100, 50]),
        ("parameter", [400]),
        ("0x2000", [100, 50, 70]),
        ("2000_2", [70]),
        ("0x20", []),
        ("0x200", [100, 50, 70]),
        ("nothing of the kind", []),
        ("", [400, 100, 50, 9, 70]),
    ],
)
def test_a_text_is_found_in_stacks_categories_and_addresses(text, wanted):
    assert bytes_found(text) == wanted


def test_a_text_is_found_in_modules_operators_and_names():
    blocks = trace("start 8 w label=Head.weight", "alloc 4 a module=mlp operator=aten::mm", "alloc 2 b")
    every, version = np.arange(3), versions(blocks)
    for text, wanted in {"head.w": [8], "MLP": [4], "aten::": [4]}.items():
        assert blocks.allocations.bytes[rows_with_text(blocks, every, text, version)].tolist() == wanted


@pytest.mark.parametrize(
    ("sort", "wanted"),
    [
        ("bytes", [400, 100, 70, 50, 9]),
        ("-bytes", [9, 50, 70, 100, 400]),
        ("born", [70, 9, 50, 100, 400]),
        ("-born", [400, 100, 50, 9, 70]),
        ("lifetime", [400, 50, 9, 100, 70]),
    ],
)
def test_allocations_are_put_in_order(sort, wanted):
    assert PROGRAM.allocations.bytes[in_order(PROGRAM, EVERY, sort)].tolist() == wanted


def test_equal_ones_stay_in_order_of_birth():
    same = trace("alloc 5 a", "alloc 9 b", "alloc 5 c")
    assert in_order(same, np.arange(3), "bytes").tolist() == [1, 0, 2]
    assert in_order(same, np.arange(3), "-bytes").tolist() == [0, 2, 1]


def test_an_order_that_does_not_exist_is_refused():
    with pytest.raises(MemPluginError, match="sort by"):
        in_order(PROGRAM, EVERY, "colour")


def test_what_was_alive_in_a_stretch():
    sizes = PROGRAM.allocations.bytes
    assert sizes[PROGRAM.allocations.alive_between(0, 6, 0)].tolist() == [400, 100, 50, 70]
    assert sizes[PROGRAM.allocations.alive_between(2, 3, 0)].tolist() == [400, 50]
    assert sizes[PROGRAM.allocations.alive_between(2, 4, 1)].tolist() == [9]


def test_divisions_that_hold_nothing_are_not_offered():
    assert informative(PROGRAM, 0) == ("category", "line", "stack")
    assert informative(PROGRAM, 1) == ("category",)
    told = program("START epoch", "alloc 1 a stream=1 context=0/0", "alloc 1 b pool=1")
    assert informative(told, 0) == ("category", "subcategory", "annotation", "pool", "stream", "context")
    step = trace("alloc 1 a module=m phase=forward operator=aten::mm")
    assert informative(step, 0) == ("category", "module", "phase", "operator")


# "w" and "a" have an address each; "a" is allocated twice. On the second device only "c" lives.
USES = program(
    "before 100 w",
    "alloc 10 a at=s",
    "free a",
    "alloc 30 a",
    "free w",
    "alloc 7 c device=1",
    "alloc 50 w",
    stacks={"s": ("f a.py:1",)},
)
W, A, C = 0x1000, 0x2000, 0x3000


def test_an_allocation_tells_the_bytes_before_and_after():
    found = usage(USES, A)
    assert (found.device, found.event, found.bytes_before, found.bytes_after) == ("cuda:0", 0, 100, 110)
    block = found.allocation
    assert (block.bytes, block.version, block.born_event, block.freed_event) == (10, 0, 0, 1)
    assert (block.frames, block.rounded_bytes) == (("f a.py:1",), None)


def test_a_free_tells_the_bytes_before_and_after():
    found = usage(USES, A, action="free")
    assert (found.event, found.bytes_before, found.bytes_after) == (1, 110, 100)


def test_versions_count_the_blocks_at_an_address_those_from_before_the_trace_too():
    assert usage(USES, A, 1).allocation.bytes == 30
    assert usage(USES, W, 0, "free").bytes_after == 30
    assert usage(USES, W, 1).bytes_after == 80


def test_a_device_is_found_or_named():
    assert usage(USES, C).device == usage(USES, C, device="cuda:1").device == "cuda:1"
    with pytest.raises(NotRecordedError, match="no allocation 0x3000_0"):
        usage(USES, C, device="cuda:0")


@pytest.mark.parametrize(
    ("address", "version", "action", "told"),
    [
        (W, 0, "alloc", "alive before the trace began"),
        (W, 1, "free", "still alive when the trace ended"),
        (A, 2, "alloc", "has versions 0 to 1"),
        (A, -1, "alloc", "has versions 0 to 1"),
        (0x9999, 0, "alloc", "no allocation 0x9999_0"),
        (0, 0, "alloc", "no allocation"),
        (1 << 70, 0, "free", "no allocation"),
        (-5, 0, "free", "no allocation"),
    ],
)
def test_what_is_not_in_the_trace_is_told(address, version, action, told):
    with pytest.raises(NotRecordedError, match=told):
        usage(USES, address, version, action)


SMALL = trace("start 400 w", "alloc 100 a", "alloc 20 b", "free b", "alloc 60 g", "free a")
"""Live: 400, 500, 520, 500, 560, 460."""


def test_bands_by_hand():
    found = bands(SMALL, 0, event_cuts(SMALL, 0, 5, 5), most=2)
    assert found.high.tolist() == [500, 520, 520, 560, 560]
    assert SMALL.allocations.bytes[found.rows].tolist() == [400, 100]
    assert list(zip(found.first.tolist(), found.last.tolist(), strict=True)) == [(0, 4), (0, 4)]
    assert found.rest.tolist() == [0, 20, 20, 60, 60]
    assert sorted(found.alive_bytes.tolist()) == [20, 60, 100, 400]
    assert (found.peak_event, found.peak_column) == (3, 3)


def test_the_rest_is_divided_by_what_its_blocks_belong_to():
    found = bands(SMALL, 0, event_cuts(SMALL, 0, 5, 5), most=2)
    part = np.where(found.alive_bytes == 20, 1, 0)
    divided = divided_rest(found, part, 2)
    assert divided.tolist() == [[0, 0, 0, 60, 60], [0, 20, 20, 0, 0]]


def test_a_block_is_drawn_in_the_columns_at_whose_moment_it_lives():
    found = bands(SMALL, 0, event_cuts(SMALL, 0, 5, 5), most=9)
    lives = zip(
        SMALL.allocations.bytes[found.rows].tolist(), found.first.tolist(), found.last.tolist(), strict=True
    )
    assert list(lives) == [(400, 0, 4), (100, 0, 4), (20, 1, 2), (60, 3, 4)]
    assert found.rest.tolist() == [0] * 5


def test_of_equal_blocks_the_first_are_drawn():
    same = trace(*(f"alloc 8 b{number}" for number in range(6)))
    found = bands(same, 0, event_cuts(same, 0, 6, 3), most=4)
    assert found.rows.tolist() == [0, 1, 2, 3]
    assert (found.rest.tolist(), sorted(found.alive.rows)) == ([0, 0, 16], [0, 1, 2, 3, 4, 5])


def test_only_what_lives_in_a_zoom_is_drawn():
    found = bands(SMALL, 0, event_cuts(SMALL, 3, 5, 4), most=9)
    assert SMALL.allocations.bytes[found.rows].tolist() == [400, 100, 60]


@st.composite
def histories(draw):
    """Blocks that come and go, of two devices."""
    lines: list[str] = []
    live: list[str] = []
    for number in range(draw(st.integers(0, 40))):
        if live and draw(st.booleans()):
            lines.append(f"free {live.pop(draw(st.integers(0, len(live) - 1)))}")
        else:
            device = draw(st.sampled_from(["cpu", "cuda:0"]))
            lines.append(f"alloc {draw(st.integers(0, 99))} b{number} device={device}")
            live.append(f"b{number}")
    return trace("start 50 w", "start 7 v", *lines)


def test_bands_from_before_the_trace_lie_by_category_and_later_ones_above_them():
    mixed = trace(
        "start 4 w category=parameter",
        "start 3 g category=gradient",
        "start 2 v category=parameter",
        "alloc 1 n category=parameter",
    )
    found = bands(mixed, 0, event_cuts(mixed, 0, 1, 1), most=4)
    assert mixed.allocations.bytes[found.rows].tolist() == [4, 2, 3, 1]


@given(histories(), st.integers(1, 60), st.integers(1, 30), st.booleans())
def test_bands_and_the_rest_sum_to_the_curve(history, columns, most, over_time):
    if over_time:
        start, end = history.steps[0].start_ns, history.steps[-1].end_ns
        cuts = time_cuts(history, start, end, columns)
        wanted = curve(history, 0, start, end, columns).high
    else:
        cuts = event_cuts(history, 0, max(len(history.events), 1), columns)
        wanted = None
    found = bands(history, 0, cuts, most)
    total = found.rest.copy()
    for row, first, last in zip(found.rows, found.first, found.last, strict=True):
        total[first : last + 1] += history.allocations.bytes[row]
    assert total.tolist() == found.high.tolist()
    assert (found.rest >= 0).all()
    assert found.alive_bytes.tolist() == history.allocations.bytes[found.alive.rows].tolist()
    divided = divided_rest(found, found.alive.rows % 3, 3)
    assert divided.sum(axis=0).tolist() == found.rest.tolist()
    assert (divided >= 0).all()
    assert len(found.rows) <= most
    assert np.all(np.diff(found.rows) > 0)
    if wanted is not None:
        assert found.high.tolist() == wanted.tolist()


@pytest.mark.parametrize("most", [1, 3])
def test_no_block_of_the_rest_is_larger_than_one_that_is_drawn(most):
    found = bands(SMALL, 0, event_cuts(SMALL, 0, 5, 5), most)
    everything = set(range(len(SMALL.allocations)))
    rest = everything - set(found.rows.tolist())
    assert min(SMALL.allocations.bytes[found.rows]) >= max(SMALL.allocations.bytes[list(rest)])
