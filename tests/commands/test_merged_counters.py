"""`export --to perfetto --add-to`: counters at the right times, and own events as they were."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tb_memplugin import combine_handlers, load, memory_trace_handler
from tb_memplugin.store.writer import RunWriter
from tests.commands.files import refused, run
from tests.traces import EPOCH, trace

MINUTE_NS = 60_000_000_000
SMALL = trace("start 400 w category=parameter", "alloc 100 a", "free a")


def recorded(folder: Path) -> Path:
    RunWriter(str(folder / "run"), "w").write(SMALL)
    return folder / "run"


def kineto(path: Path, *events: dict[str, Any], base: int | None = EPOCH - MINUTE_NS, **head: Any) -> Path:
    based = {} if base is None else {"baseTimeNanoseconds": base}
    path.write_text(json.dumps({"schemaVersion": 1, **head, **based, "traceEvents": events}))
    return path


def call(ts: float, **fields: Any) -> dict[str, Any]:
    return {"ph": "X", "name": "mine", "pid": 7, "tid": 1, "ts": ts, "dur": 10.5, **fields}


def merged(run_folder: Path, kineto_path: Path, out: Path) -> tuple[list[dict[str, Any]], str]:
    done = run("export", run_folder, "--to", "perfetto", "--add-to", kineto_path, "-o", out)
    assert done.exit_code == 0, done.output
    return json.loads(out.read_text())["traceEvents"], done.stderr


def levels(events: list[dict[str, Any]], name: str = "allocated") -> list[tuple[float, int]]:
    return [
        (event["ts"], event["args"]["bytes"])
        for event in events
        if event["ph"] == "C" and event["name"] == name
    ]


@pytest.mark.parametrize(
    ("base", "zero"),
    [
        (EPOCH - MINUTE_NS, 60_000_000),
        (None, EPOCH // 1000),
    ],  # of PyTorch before 2.4, times count from the epoch
)
def test_counters_have_the_times_of_the_trace(tmp_path: Path, base: int | None, zero: int) -> None:
    path = kineto(tmp_path / "t.json", call(zero), base=base)
    events, _ = merged(recorded(tmp_path), path, tmp_path / "out.json")
    assert levels(events) == [(zero, 400), (zero + 0.5, 500), (zero + 1.5, 400)]
    assert levels(events, "allocated: parameter") == [(zero, 400)]


def test_the_own_events_keep_every_byte(tmp_path: Path) -> None:
    """Text of them that looks like a list of events is no place for counters."""
    trap = '"traceEvents": ['
    path = kineto(
        tmp_path / "t.json", call(60_000_000, args={"x": trap}), note=trap, nested={"traceEvents": [1]}
    )
    original = path.read_text().replace('"ts": 60000000', '"ts": 60000000.000')
    path.write_text(original)
    merged(recorded(tmp_path), path, tmp_path / "out.json")
    text = (tmp_path / "out.json").read_text()
    begin = original.rindex('"traceEvents": [{') + len('"traceEvents": [')
    assert text.startswith(original[:begin])
    assert text.endswith(original[begin:])
    ours = json.loads(text)["traceEvents"]
    assert [event["name"] for event in ours if event["pid"] == 7] == ["mine"]
    assert {event["pid"] for event in ours} == {7, 8}


def test_a_list_of_events_alone_is_a_trace_too(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps([call(EPOCH / 1000)]))
    out = tmp_path / "out.json"
    assert run("export", recorded(tmp_path), "--to", "perfetto", "--add-to", path, "-o", out).exit_code == 0
    assert len(levels(json.loads(out.read_text()))) == 3


def test_a_trace_of_another_time_is_refused(tmp_path: Path) -> None:
    path = kineto(tmp_path / "t.json", call(0.0))
    message = refused(
        "export", recorded(tmp_path), "--to", "perfetto", "--add-to", path, "-o", tmp_path / "o"
    )
    assert "have no time in common" in message
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    "content", ["{}", '{"traceEvents": 1}', '{"traceEvents": []}', "no", '[{"ph": "M"}]']
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(content)
    refused("export", recorded(tmp_path), "--to", "perfetto", "--add-to", path, "-o", tmp_path / "o")


def test_the_trace_itself_is_not_replaced(tmp_path: Path) -> None:
    path = kineto(tmp_path / "t.json", call(60_000_000))
    message = refused("export", recorded(tmp_path), "--to", "perfetto", "--add-to", path, "-o", path)
    assert "would replace the recording itself" in message


def test_other_formats_take_no_trace(tmp_path: Path) -> None:
    path = kineto(tmp_path / "t.json", call(60_000_000))
    message = refused("export", recorded(tmp_path), "--to", "csv", "--add-to", path, "-o", tmp_path / "o")
    assert "--add-to changes nothing in csv" in message


def test_a_real_profile_and_its_recording_agree_to_the_nanosecond(tmp_path: Path) -> None:
    net = torch.nn.Linear(64, 64)
    handler = memory_trace_handler(tmp_path / "run", "w", model=net)
    user = tmp_path / "user.pt.trace.json.gz"
    ready = combine_handlers(handler, lambda prof: prof.export_chrome_trace(str(user)))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, on_trace_ready=ready):
        net(torch.ones(8, 64)).sum().backward()
    out = tmp_path / "merged.json.gz"
    done = run("export", tmp_path / "run", "--to", "perfetto", "--add-to", user, "-o", out)
    assert done.exit_code == 0, done.output
    own, both = (json.loads(gzip.decompress(path.read_bytes())) for path in (user, out))
    assert {**both, "traceEvents": 0} == {**own, "traceEvents": 0}
    assert both["traceEvents"][-len(own["traceEvents"]) :] == own["traceEvents"]
    counters = dict(levels(both["traceEvents"]))
    memory = [event for event in own["traceEvents"] if event["name"] == "[memory]"]
    recording = load(tmp_path / "run")
    first = recording.live(0)[0]
    assert len(memory) == len(recording.events) > 5
    size = first
    for event in sorted(memory, key=lambda event: event["args"]["Ev Idx"]):
        size += event["args"]["Bytes"]
        assert counters[event["ts"]] == size
    assert f"note: {len(memory)} of the {len(memory)} allocations and frees" in done.stderr
