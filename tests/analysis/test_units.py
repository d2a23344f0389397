"""Bytes in words: one rule, in sentences, in tables, and in the tab."""

from pathlib import Path

import pytest

from tb_memplugin.analysis.oom import oom_report
from tb_memplugin.analysis.units import FEWEST, NAMES, Unit, counted, part_text, size_text
from tb_memplugin.commands.tables import Unit as OfTables
from tests.analysis.histories import allocator_trace

TAB = Path(__file__).parents[2] / "frontend" / "src" / "state" / "bytes.ts"


@pytest.mark.parametrize(
    ("size", "told"),
    [
        (0, "0 B"),
        (4095, "4,095 B"),
        (4096, "4.00 KiB"),
        (3 << 20, "3,072.00 KiB"),
        (1_352_914_698, "1,290.24 MiB"),
        (5308694528, "4.94 GiB"),
        (-(4 << 40), "-4.00 TiB"),
        (3 << 50, "3,072.00 TiB"),
    ],
)
def test_a_unit_has_four_or_more_of_what_it_tells(size, told):
    assert size_text(size) == told


def test_a_part_is_told_in_the_unit_of_its_whole_unless_it_is_less_than_one():
    assert part_text(2 << 20, 12 << 20) == "2.00 MiB"
    assert part_text(100 << 10, 12 << 20) == "100.00 KiB"


def test_the_largest_of_a_table_gives_its_unit():
    assert Unit.for_bytes([1, 5 << 30, 7 << 20]).name == "GiB"
    assert Unit.for_bytes([]).name == "B"


def test_reports_and_tables_use_it():
    history = allocator_trace("alloc 16M 5M", "oom 3M 90M")
    assert oom_report(history).why.startswith("PyTorch uses 5.00 MiB")
    assert "The device had 3,072.00 KiB free" in oom_report(history).why
    assert OfTables is Unit


def test_the_tab_has_the_same_rule():
    told = TAB.read_text("utf-8")
    assert f"const FEWEST = {FEWEST};" in told
    assert all(f'name: "{name}"' in told for name in NAMES)


def test_one_is_singular_and_others_are_not():
    assert [counted(count, "step") for count in (0, 1, 2, 2_000)] == [
        "0 steps",
        "1 step",
        "2 steps",
        "2,000 steps",
    ]
