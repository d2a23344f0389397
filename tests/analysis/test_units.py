"""Bytes in words: one rule, in sentences, in tables, and in the tab."""

import json
from pathlib import Path

import pytest

from tb_memplugin.analysis.oom import oom_report
from tb_memplugin.analysis.units import Unit, counted, part_text, size_text
from tb_memplugin.commands.tables import Unit as OfTables
from tests.analysis.histories import allocator_trace

CASES = json.loads(Path(__file__).with_name("sizes.json").read_text("utf-8"))
"""Also held by the tab: frontend/tests/state/bytes.test.ts."""


@pytest.mark.parametrize(("size", "told"), CASES)
def test_sizes_have_three_or_four_digits_of_the_largest_unit(size, told):
    assert size_text(size) == told
    assert size == 0 or size_text(-size) == f"-{told}"


def test_what_is_there_is_never_nothing():
    mib = Unit("MiB", 2**20)
    assert [mib.show(size) for size in (0, 1, 5_242, 5_243, -1)] == [
        "0.00",
        "< 0.01",
        "< 0.01",
        "0.01",
        "> -0.01",
    ]
    assert [mib.signed(size) for size in (0, 1, 2**20, -1, -(2**20))] == [
        *("0.00", "< +0.01", "+1.00", "> -0.01", "-1.00"),
    ]


def test_a_part_is_told_in_the_unit_of_its_whole_unless_it_is_less_than_a_tenth():
    assert part_text(2 << 20, 12 << 20) == "2.00 MiB"
    assert part_text(768 << 10, 12 << 20) == "0.75 MiB"
    assert part_text(100 << 10, 12 << 20) == "100.0 KiB"


def test_the_largest_of_a_table_gives_its_unit():
    assert Unit.for_bytes([1, 5 << 30, 7 << 20]).name == "GiB"
    assert Unit.for_bytes([]).name == "B"


def test_reports_and_tables_use_it():
    history = allocator_trace("alloc 16M 5M", "oom 3M 90M")
    assert oom_report(history).why.startswith("PyTorch uses 5.00 MiB")
    assert "The device had 3.00 MiB free" in oom_report(history).why
    assert OfTables is Unit


def test_one_is_singular_and_others_are_not():
    assert [counted(count, "step") for count in (0, 1, 2, 2_000)] == [
        "0 steps",
        "1 step",
        "2 steps",
        "2,000 steps",
    ]
