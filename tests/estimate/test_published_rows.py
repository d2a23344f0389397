"""Tests of the benchmark of published peaks: its rows, a part of its estimates, and the page made from it."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

import pytest

from benchmarks.published.__main__ import (
    BEGIN,
    END,
    PAGE,
    REASONS,
    Result,
    estimated,
    read_peaks,
    read_sources,
)
from benchmarks.published.programs import PROGRAMS
from tb_memplugin.estimate.answer.estimation import RESERVED_OFF
from tb_memplugin.estimate.gpu_spec import GpuSpec

PEAKS = read_peaks()
RESULTS = PAGE.read_text("utf-8").split(BEGIN)[1].split(END)[0]
SMALL = [
    peak
    for peak in PEAKS
    if peak.program in ("rms_norm", "layer_norm", "rope", "attention", "attention_by_parts", "swiglu")
    and peak.options.get("hidden") in (None, "1024", "2048")
    and peak.options.get("width") in (None, "16", "128")
    and peak.options.get("sequence") in (None, "1024", "2048")
]
"""Rows of every kind that take a fraction of a second."""


def test_every_row_says_where_it_is_from_and_what_it_measures() -> None:
    sources = read_sources()
    for peak in PEAKS:
        assert urlsplit(sources[peak.source]["url"]).scheme == "https"
        assert peak.ran_as in GpuSpec.names()
        assert peak.metric in ("allocated", "reserved")
        assert peak.program in (*PROGRAMS, "nanotron")
        assert peak.bytes > 1 << 20
    rows = {(peak.source, peak.program, peak.config, peak.metric) for peak in PEAKS}
    assert len(rows) == len(PEAKS) - 1  # Liger has one size of rope in two of its tables
    assert {peak.source for peak in PEAKS} == sources.keys()


@pytest.mark.parametrize("peak", SMALL, ids=lambda peak: f"{peak.source}-{peak.program}-{peak.config}")
def test_modules_and_attentions_need_what_was_published(peak) -> None:
    """RMSNorm lacks one vector of float32, four bytes of some 80,000 for each column; values are rounded."""
    assert abs(Result(peak, estimated(peak)).off) < (5e-5 if peak.program == "rms_norm" else 5e-6)


def test_the_page_has_every_row_and_a_reason_for_those_that_are_far_off() -> None:
    assert f"{len(PEAKS)} rows, estimated" in RESULTS
    assert "**not known**" not in RESULTS
    assert RESULTS.count("| gpt_from_scratch change=") >= 8
    assert all(reason in RESULTS for reason in REASONS.values())


def test_bounds_of_verdicts_include_how_far_reserved_memory_is_off() -> None:
    offs = re.findall(r"\| reserved \| \d+ \|[^|]+\|[^|]+\| ([+-][\d.]+) % \| ([+-][\d.]+) % \|", RESULTS)
    assert len(offs) >= 4
    lowest, highest = min(float(low) for low, _ in offs), max(float(high) for _, high in offs)
    assert 100 * RESERVED_OFF[0] <= lowest
    assert 100 * RESERVED_OFF[1] == pytest.approx(highest)
