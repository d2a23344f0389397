"""Columns straight from a pickle's opcodes are what `pickle` reads, or the safe reader reads the pickle."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import random
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tb_memplugin import loading
from tb_memplugin.loading import load
from tb_memplugin.read.snapshot.columns import scan
from tb_memplugin.read.snapshot.columns.rest import read_columns
from tb_memplugin.read.snapshot.columns.scan import Scan
from tb_memplugin.read.snapshot.entries import EntryColumns, joined_objects
from tb_memplugin.read.snapshot.trace import trace_from_snapshot
from tb_memplugin.trace import MemoryTrace
from tests.read.snapshot.columns.mutants import PROTOCOLS, difference, example, fault, framed, mutants
from tests.read.snapshot.test_real import SNAPSHOTS, real
from tests.snapshots import load_plain

OWN = sorted(Path(__file__).parents[3].joinpath("data").glob("*/*.pickle.gz"))


def columns_of(content: object, protocol: int = 4) -> Any:
    return read_columns(io.BytesIO(pickle.dumps(content, protocol)), "x", least_bytes=0)


def tables(trace: MemoryTrace) -> dict[str, Any]:
    return {
        "events": [getattr(trace.events, name).tolist() for name in ("time_ns", "address", "bytes", "stack")],
        "start": trace.start.bytes.tolist(),
        "names": (trace.stacks, trace.labels, trace.streams, trace.pools, trace.contexts, trace.notes),
    }


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("dumps", [pickle.dumps, pickle._dumps])  # type: ignore[attr-defined]
def test_every_column_is_what_pickle_reads(protocol: int, dumps: Any) -> None:
    raw = dumps(example(), protocol)
    assert fault(raw) is None
    assert sum(Scan(io.BytesIO(raw)).runs) > 0.9 * 400  # of the entries


def test_windows_of_any_size_give_the_same_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    content = example()
    for size in (1 << 10, 5_000, 77_777):
        monkeypatch.setattr(scan, "WINDOW_BYTES", size)
        monkeypatch.setattr(scan, "SAMPLES", 8)
        for protocol in (2, 4):
            assert difference(columns_of(content, protocol), content) is None


@pytest.mark.parametrize("path", OWN, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_recordings_of_each_version_of_pytorch_are_equal(path: Path) -> None:
    raw = gzip.decompress(path.read_bytes())
    assert fault(raw) in (None, "left")
    content = load_plain(raw, path.name)
    for protocol in PROTOCOLS:
        assert fault(pickle.dumps(content, protocol)) in (None, "left")


@pytest.mark.parametrize("name", ["expandable", "out_of_memory", "profiled", "wrapped"])
def test_each_version_of_pytorch_has_recordings_that_are_read_as_columns(name: str) -> None:
    paths = [path for path in OWN if path.name.startswith(name)]
    assert len(paths) == 8
    assert {fault(gzip.decompress(path.read_bytes())) for path in paths} == {None}


@real
def test_strangers_snapshots_are_equal_and_large_ones_are_read_as_columns() -> None:
    ends = {path.name[:2]: fault(path.read_bytes()) for path in sorted(SNAPSHOTS.iterdir())}
    assert {number for number, end in ends.items() if end is None} == {
        *("01", "03", "07", "10", "12", "20", "53", "57")
    }
    assert set(ends.values()) == {None, "left"}


@pytest.mark.parametrize("protocol", [2, 4])
def test_mutants_are_read_as_pickle_reads_them_or_left_to_the_safe_reader(protocol: int) -> None:
    raw = pickle.dumps(example(120), protocol)
    ends = Counter(map(fault, mutants(random.Random(24), raw, 400)))
    assert set(ends) == {None, "left"}
    assert ends[None] > 40


def test_json_that_was_pickled_again_is_left_or_equal() -> None:
    content = json.loads(json.dumps(example(60)))
    assert fault(pickle.dumps(content)) in (None, "left")


def test_the_trace_is_the_one_of_the_dicts() -> None:
    content = example()
    assert tables(trace_from_snapshot(columns_of(content), "x")) == tables(trace_from_snapshot(content, "x"))


@pytest.fixture
def of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "read_columns", partial(read_columns, least_bytes=0))


@pytest.mark.usefixtures("of_any_size")
def test_a_file_is_read_once_where_it_is_regular(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(example(600)))
    read: list[int] = []
    load(path, progress=lambda done, _: read.append(done))
    assert read == sorted(read)


@pytest.mark.usefixtures("of_any_size")
def test_a_field_of_a_wrong_type_has_the_message_of_the_safe_reader(tmp_path: Path) -> None:
    content = example(600)
    content["device_traces"][0][50]["size"] = "wide"
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(content))
    with pytest.raises(Exception, match="size is str, not a whole number"):
        load(path)


def shared(change: str) -> dict[str, Any]:
    content = example()
    rows = content["device_traces"][0]
    if change == "an entry is also elsewhere":
        content["twice"] = rows[200]
    elif change == "a list of frames is also elsewhere":
        content["twice"] = rows[199]["frames"]
    elif change == "devices share their entries":
        content["device_traces"][1] = rows
    elif change == "an entry appears twice":
        rows.append(rows[100])
    elif change == "a trace contains itself":
        rows.append(rows)
    elif change == "devices are also the host":
        content["host_traces"] = content["device_traces"]
    elif change == "a trace is also the host's":
        content["host_traces"] = rows
    elif change == "the snapshot contains itself":
        content["allocator_settings"]["all"] = content
    return content


@pytest.mark.parametrize(
    "change",
    [
        "an entry is also elsewhere",
        "a list of frames is also elsewhere",
        "devices share their entries",
        "an entry appears twice",
        "a trace contains itself",
        "devices are also the host",
        "a trace is also the host's",
        "the snapshot contains itself",
    ],
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_shared_objects_stay_shared_or_are_left_to_the_safe_reader(change: str, protocol: int) -> None:
    raw = pickle.dumps(shared(change), protocol)
    assert fault(raw) in (None, "left")
    assert (fault(raw) is None) == (change == "a list of frames is also elsewhere")


def test_frames_that_cut_a_token_are_left_to_the_safe_reader() -> None:
    tokens = pickle.dumps(example(), 3)
    raw = b"\x80\x04" + tokens[2:].replace(b"q", b"q")
    assert fault(framed(raw)) == "left"


def test_numbers_and_their_absence_are_as_in_the_dicts() -> None:
    content = example()
    trace = columns_of(content)["device_traces"][0]
    assert isinstance(trace, EntryColumns)
    written = content["device_traces"][0]
    assert list(trace.column("addr").each()) == [entry.get("addr") for entry in written]
    assert trace.at(50, "device_free") == 50 << 20
    assert trace.column("nothing").each() == [None] * 300
    with pytest.raises(KeyError, match="addr"):
        trace.required("addr")


def test_columns_are_freed_when_their_trace_is_read() -> None:
    content = columns_of(example())
    read = trace_from_snapshot(content, "example")
    assert len(read.events) == 300 + 100
    assert content["device_traces"][0].column("size").each() == [None] * 300


@pytest.mark.parametrize("far", [1, 5_000_000])
def test_objects_are_in_order_of_appearance_however_far_their_numbers_are_apart(far: int) -> None:
    is_most, codes = np.array([True, False, True]), np.array([far, -1], np.int32)
    column = joined_objects(is_most, codes, {-1: "a", far: "b"}, [1], ["c"])
    assert column.values == column.each() == ["b", "c", "a"]
