"""JSON: everything is in it, and docs/json_format.md says where."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tb_memplugin.exports import json as json_export
from tb_memplugin.trace import Cause, Counter, CounterReading, DevicePart, Events, Moment, Note, WholeDevice
from tests.traces import EPOCH, trace

DOCUMENT = Path(__file__).parents[2] / "docs" / "json_format.md"

SMALL = trace(
    "start 400 w category=parameter module=layer label=layer.weight",
    "step 5",
    "alloc 100 a category=activation module=layer operator=aten::mm phase=forward",
    "free a",
    calls=[("layer", 0, 0, "forward")],
    notes=(Note("A note."),),
)


def read(written, path):
    json_export.write(written, path)
    return json.loads(path.read_text("ascii"))


@pytest.fixture
def document(tmp_path):
    return read(SMALL, tmp_path / "out.json")


def test_the_levels_and_the_peak_of_each_device_are_told(document):
    (cpu,) = document["devices"]
    assert (cpu["name"], cpu["start_bytes"], cpu["peak_bytes"], cpu["end_bytes"]) == ("cpu", 400, 500, 400)
    assert (cpu["peak_event"], cpu["peak_time_ns"], cpu["peak_reserved_bytes"]) == (0, 500, None)
    assert cpu["at_peak"]["category"] == [
        {"key": "parameter", "bytes": 400, "count": 1},
        {"key": "activation", "bytes": 100, "count": 1},
    ]
    for parts in cpu["at_peak"].values():
        assert sum(part["bytes"] for part in parts) == 500


def test_the_account_has_a_line_and_the_numbers_behind_it(document, tmp_path):
    assert document["devices"][0]["account"]["level"] == "not_recorded"
    reading = CounterReading(0, Moment.PEAK, Counter.CALLS, 625, causes=((Cause.UNSEEN, 120),))
    (cpu,) = read(replace(SMALL, counters=(reading,)), tmp_path / "counted.json")["devices"]
    assert cpu["account"] == {
        "level": "different",
        "text": "accounts for 80.00 % of the allocator's bytes: 125 B missing at the peak (120 B allocated "
        "or freed where the recorder does not see it; 5 B for no known reason)",
        "moments": [
            {
                "moment": "peak",
                "counted_bytes": 500,
                "counter": "calls",
                "allocator_bytes": 625,
                "at_least": False,
                "missing_bytes": 125,
                "causes": [{"cause": "unseen", "bytes": 120}],
            }
        ],
    }


def test_the_whole_device_has_its_parts_with_words(document, tmp_path):
    assert document["devices"][0]["whole_device"] is None
    whole = WholeDevice(0, Moment.END, Moment.END, ((DevicePart.PROCESS, 600), (DevicePart.FREE, 400)))
    (cpu,) = read(replace(SMALL, whole_devices=(whole,)), tmp_path / "whole.json")["devices"]
    assert cpu["whole_device"] == {
        "name": "the machine's memory",
        "moments": [
            {
                "moment": "end",
                "read_at": "end",
                "text": "at the window's end",
                "total_bytes": 1000,
                "parts": [
                    {"part": "process", "text": "this process", "bytes": 600},
                    {"part": "free", "text": "free", "bytes": 400},
                ],
            }
        ],
    }


def test_times_count_from_an_epoch_that_is_text(document):
    assert document["epoch_ns"] == str(EPOCH)
    assert document["events"]["time_ns"] == [500, 1500]
    assert document["steps"] == [{"number": 5, "start_ns": 0, "end_ns": 2000}]
    assert document["calls"]["start_ns"] == [0]


@pytest.mark.parametrize("column", [name for name in Events.__slots__ if name != "time_ns"])
def test_every_column_of_the_events_is_there(document, column):
    assert document["events"][column] == getattr(SMALL.events, column).tolist()


def test_columns_point_into_the_tables(document):
    tables, events = document["tables"], document["events"]
    assert tables["kinds"][events["kind"][1]] == "free_completed"
    assert tables["categories"][events["category"][0]] == "activation"
    assert tables["operators"][events["operator"][0]] == "aten::mm"
    assert tables["modules"][events["module"][0]]["key"] == "layer"
    assert tables["labels"][document["start"]["label"][0]] == "layer.weight"


def test_the_life_of_every_allocation_is_told(document):
    assert document["allocations"] == {"born": [-1, 0], "freed": [2, 1]}


def test_the_format_is_documented(document):
    text = DOCUMENT.read_text("utf-8")
    keys = {*document, *document["devices"][0], *document["tables"]}
    for part in ("events", "start", "segments", "annotations", "calls"):
        keys |= set(document[part])
    told = set(re.findall(r"`([a-z_]+)`", text))
    assert sorted(keys - told) == []
    assert document["version"] == json_export.VERSION


def test_an_empty_trace_is_a_document(tmp_path):
    document = read(trace(), tmp_path / "out.json")
    assert document["events"]["time_ns"] == []
    assert np.array(document["start"]["bytes"]).sum() == 0


def test_hostile_names_stay_text(tmp_path):
    name = '</script>"\u2028\ud800\0'
    document = read(replace(SMALL, labels=(name,)), tmp_path / "out.json")
    assert document["tables"]["labels"] == [name]
