"""Results are short as text, and become tables of pandas and Arrow without losing a byte."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tb_memplugin import analysis, load
from tb_memplugin.analysis import compare, curve, peak, stack_table, step_stats
from tb_memplugin.analysis.divisions import Part
from tb_memplugin.analysis.moments import moment
from tb_memplugin.analysis.peak_holders import Holder, PeakHolders
from tb_memplugin.analysis.steps import StepSeries
from tb_memplugin.errors import MemPluginError
from tb_memplugin.trace.result import MOST_CHARACTERS, Names, ResultTable, column_of, json_value
from tests.traces import EPOCH, trace

RECORDED = Path(__file__).parents[1] / "data" / "torch-2.13.0"
OF_DEVICES = {"advice", "peak", "compare", "usage", "stages"}
"""Functions that take the name of a device, or none."""

SMALL = trace(
    "start 400 w category=parameter module=net.a label=weight",
    "alloc 100 a category=activation module=net.a phase=forward",
    "alloc 60 b category=gradient",
    "free a",
)


def results(recorded: Any) -> Iterator[tuple[str, Any]]:
    """What each public function of the analyses returns."""
    values: dict[str, Any] = {
        "trace": recorded,
        "base": recorded,
        "other": recorded,
        "device": 0,
        "by": "stack",
        "event": peak(recorded).event,
        "t0_ns": recorded.steps[0].start_ns,
        "columns": 500,
        "t1_ns": recorded.steps[-1].end_ns,
        "address": int(recorded.events.address[0]),
        "number": 0,
        "texts": ["a=b"],
        "text": "0x1",
        "start_ns": None,
        "end_ns": None,
        "row": 0,
        "version": 0,
        "times_ns": recorded.events.time_ns,
        "first": 0,
        "end": len(recorded.events),
        "every": 1,
    }
    for name in analysis.__all__:
        function = getattr(analysis, name)
        if inspect.isfunction(function) and (name != "oom_report" or recorded.ooms):
            wanted = [
                each
                for each in inspect.signature(function).parameters.values()
                if each.kind < each.KEYWORD_ONLY
            ]
            names = [each.name for each in wanted if each.default is each.empty or each.name == "by"]
            yield name, function(**{each: values[each] for each in names})


@pytest.mark.parametrize("file", ["training", "out_of_memory"])
def test_no_result_is_long_as_text(file: str) -> None:
    texts = {name: repr(result) for name, result in results(load(RECORDED / f"{file}.pickle.gz"))}
    assert len(texts) > 20
    assert {name: len(text) for name, text in texts.items() if len(text) > MOST_CHARACTERS} == {}


def test_a_text_tells_the_fields_and_how_many_more() -> None:
    state = moment(SMALL, 0, 1)
    assert repr(state.parts("category")[2]) == "Part(key='gradient', bytes=60, count=1, categories={})"
    assert repr(state.parts("category")) == (
        "ResultTable(Part(key='parameter', bytes=400, count=1, categories={}), ... 2 more)"
    )
    assert repr(ResultTable()) == "ResultTable()"


def test_a_table_is_a_tuple() -> None:
    parts = moment(SMALL, 0, 1).parts("category")
    assert parts == tuple(parts)
    assert [part.key for part in parts] == ["parameter", "activation", "gradient"]


def test_parts_become_a_data_frame() -> None:
    frame = moment(SMALL, 0, 1).parts("category").to_pandas()
    assert frame[["key", "bytes", "count"]].values.tolist() == [
        ["parameter", 400, 1],
        ["activation", 100, 1],
        ["gradient", 60, 1],
    ]


def test_properties_are_columns_too() -> None:
    rows = compare(SMALL, SMALL)[0].rows
    assert rows.to_pandas()["delta_bytes"].tolist() == [0, 0, 0]


def test_what_is_not_known_is_missing_and_large_numbers_stay_exact() -> None:
    """A float has 53 bits; epoch nanoseconds need 61."""
    largest = moment(SMALL, 0, 1).largest.to_pandas()
    assert str(largest["born_ns"].dtype) == "Int64"
    assert largest["born_ns"].isna().tolist() == [True, False, False]
    assert largest["born_ns"][1] == EPOCH + 500
    assert largest["category"].tolist() == ["parameter", "activation", "gradient"]


def test_a_trace_is_its_allocations() -> None:
    frame = SMALL.to_pandas()
    assert frame["bytes"].tolist() == [400, 100, 60]
    assert frame["category"].tolist() == ["parameter", "activation", "gradient"]
    assert frame["module"].tolist()[:2] == ["net.a", "net.a"]
    assert frame["name"].tolist()[0] == "weight"
    assert frame["born_event"].isna().tolist() == [True, False, False]
    assert frame["born_ns"][1] == EPOCH + 500
    assert frame["freed_ns"].isna().tolist() == [True, False, True]
    assert frame["freed_ns"][1] == EPOCH + 2_500


def test_the_bytes_of_a_real_trace_sum_to_its_peak() -> None:
    recorded = load(RECORDED / "training.pickle.gz")
    state, frame = peak(recorded), recorded.to_pandas()
    alive = frame[
        (frame.born_event.fillna(-1) <= state.event) & (frame.freed_event.fillna(1 << 62) > state.event)
    ]
    assert alive["bytes"].sum() == state.bytes
    by_line = alive.groupby("line", observed=True)["bytes"].sum()
    assert by_line.to_dict() == {part.key: part.bytes for part in state.parts("line")}


def test_a_curve_has_a_column_for_each_key() -> None:
    drawn = curve(SMALL, 0, SMALL.steps[0].start_ns, SMALL.steps[0].end_ns, 3)
    frame = drawn.to_pandas()
    keys = [name for name in frame if name not in ("low_bytes", "high_bytes")]
    assert set(keys) >= {"parameter_bytes", "activation_bytes", "gradient_bytes"}
    assert (frame[keys].sum(axis=1) == frame["high_bytes"]).all()


def test_columns_are_exact() -> None:
    assert np.asarray(column_of([1, 2**63])).dtype == np.uint64
    assert column_of([True, False]) == [True, False]
    assert column_of([]) == []
    assert column_of(["\ud800"]) == ["\\ud800"]


def test_a_name_that_is_twice_in_its_table_is_one_category() -> None:
    names = Names([0, 1, 2, -1], ["a", "b", "a"])
    assert (names.row.tolist(), names.names) == ([0, 1, 0, -1], ["a", "b"])


def test_arrow_has_the_same_numbers_as_pandas() -> None:
    pytest.importorskip("pyarrow")
    recorded = load(RECORDED / "training.pickle.gz")
    hostile = replace(SMALL, labels=("\ud800", "=1+1"))
    for each in (
        recorded,
        hostile,
        stack_table(recorded, 0),
        step_stats(recorded, 0),
        peak(recorded).largest,
    ):
        table, frame = each.to_arrow(), each.to_pandas()
        assert table.column_names == list(frame.columns)
        for name in table.column_names:
            ours = [None if value is pd.NA or value != value else value for value in frame[name].tolist()]
            assert table[name].to_pylist() == ours


def test_parts_without_categories_can_be_written_to_parquet(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    import pyarrow.parquet

    parts = ResultTable((Part("a.py:1 (step)", 3, 1), Part("(no stack)", 2, 1)))
    pyarrow.parquet.write_table(parts.to_arrow(), tmp_path / "parts.parquet")
    table = pyarrow.parquet.read_table(tmp_path / "parts.parquet")
    assert table["bytes"].to_pylist() == [3, 2]
    assert table["categories"].to_pylist() == [None, None]


@pytest.mark.parametrize(("name", "extra"), [("pandas", "pandas"), ("pyarrow", "arrow")])
def test_without_the_library_it_says_what_to_install(
    name: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MemPluginError, match=rf"tb-memplugin\[{extra}\]"):
        SMALL.to_pandas() if name == "pandas" else SMALL.to_arrow()


def test_json_has_the_fields_of_results_and_the_values_of_arrays() -> None:
    peak_of_cpu = PeakHolders("cpu", 3, 7, 60, "module", (HOLDER,), (("parameter", 60),))
    held, steps = json.loads(json.dumps([peak_of_cpu, STEPS], default=json_value))
    assert list(held) == ["device", "step", "event", "bytes", "by", "holders", "categories"]
    assert (held["device"], held["categories"]) == ("cpu", {"parameter": 60})
    assert held["holders"] == [asdict(HOLDER)]
    assert (steps["first"], steps["reserved"], steps["count"]) == ([1, 2], None, 2)


HOLDER = Holder("a.weight", 60, 2, "parameter", is_name=True)
COLUMN = np.array([1, 2])
STEPS = StepSeries(COLUMN, COLUMN, COLUMN, COLUMN, COLUMN, reserved=None, count=2)


def test_what_has_no_form_in_json_is_an_error() -> None:
    with pytest.raises(TypeError, match="set has no form in JSON"):
        json.dumps({1}, default=json_value)
