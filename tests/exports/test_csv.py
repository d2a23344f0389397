"""CSV: a row per allocation, and no cell that a spreadsheet would run."""

from __future__ import annotations

import csv
from dataclasses import replace

import numpy as np
import pytest

from tb_memplugin.analysis.allocations import read_allocation, usage
from tb_memplugin.exports import csv as csv_export
from tb_memplugin.read.snapshot.trace import trace_from_snapshot
from tests.snapshots import entries, snapshot
from tests.traces import EPOCH, trace

SMALL = trace(
    "start 400 w category=parameter module=layer label=layer.weight",
    "alloc 100 a category=activation module=layer operator=aten::mm phase=forward",
    "free a",
)


def rows(written, path, **options):
    csv_export.write(written, path, **options)
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def test_every_allocation_is_a_row(tmp_path):
    start, made = rows(SMALL, tmp_path / "out.csv")
    assert tuple(start) == csv_export.COLUMNS
    assert {key: made[key] for key in ("device", "bytes", "category", "phase", "module", "operator")} == {
        "device": "cpu",
        "bytes": "100",
        "category": "activation",
        "phase": "forward",
        "module": "layer",
        "operator": "aten::mm",
    }
    assert (made["born_event"], made["freed_event"]) == ("0", "1")
    assert (made["born_ns"], made["freed_ns"]) == (str(EPOCH + 500), str(EPOCH + 1500))
    assert made["address"] == "0x2000"
    assert (start["name"], start["born_event"], start["born_ns"]) == ("layer.weight", "", "")
    assert (start["freed_event"], start["freed_ns"], start["operator"], start["stack"]) == ("", "", "", "")


def test_blocks_at_one_address_are_told_apart_as_usage_takes_them(tmp_path):
    lines = ("alloc 8 100", "free_completed 8 100", "alloc 8 50", "alloc 600 70", "free_completed 8 50")
    again = trace_from_snapshot(snapshot([], entries(*lines, "alloc 8 10")), "x")
    made = rows(again, tmp_path / "out.csv")
    found = [(usage(again, *read_allocation(row["address_version"])).allocation.bytes) for row in made]
    assert found == [100, 50, 70, 10]
    assert [row["address_version"][-2:] for row in made] == ["_0", "_1", "_0", "_2"]


def test_the_module_that_is_the_model_has_a_name_and_no_module_has_none(tmp_path):
    made = trace("alloc 1 a", "alloc 2 b module=", "alloc 4 c module=layer")
    names = {row["bytes"]: row["module"] for row in rows(made, tmp_path / "out.csv")}
    assert names == {"1": "", "2": "(root)", "4": "layer"}


def test_bytes_sum_to_what_is_live(tmp_path):
    read = rows(SMALL, tmp_path / "out.csv")
    assert sum(int(row["bytes"]) for row in read if not row["born_event"]) == SMALL.live(0)[0] == 400


def test_a_stack_has_its_frames_in_order_and_can_be_left_out(tmp_path):
    stacked = replace(
        SMALL,
        stacks=(("inner a.py:1", "outer b,c.py:2"),),
        events=replace(SMALL.events, stack=np.array([0, -1], np.int32)),
    )
    made = rows(stacked, tmp_path / "out.csv")[1]
    assert (made["stack_number"], made["stack"]) == ("0", "inner a.py:1 <- outer b,c.py:2")
    assert made["line"] == "a.py:1 (inner)"
    bare = rows(stacked, tmp_path / "out.csv", stacks=False)[1]
    assert (bare["stack_number"], bare["stack"], bare["line"]) == ("0", "", "a.py:1 (inner)")


@pytest.mark.parametrize("name", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1"])
def test_what_looks_like_a_formula_is_text(name, tmp_path):
    named = replace(SMALL, labels=(name,))
    assert rows(named, tmp_path / "out.csv")[0]["name"] == f"'{name}"


@pytest.mark.parametrize("name", ['a,b"c', "two\nlines", "é…", "'", "\ud800"])
def test_any_name_is_one_cell(name, tmp_path):
    first, second = rows(replace(SMALL, labels=(name,)), tmp_path / "out.csv")
    assert first["name"] == name.encode("utf-8", "backslashreplace").decode()
    assert second["bytes"] == "100"


def test_an_empty_trace_is_a_line_of_names(tmp_path):
    assert rows(trace(), tmp_path / "out.csv") == []
