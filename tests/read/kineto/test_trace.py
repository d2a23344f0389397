"""Kineto traces: small ones that a person can work out, and real ones to the byte."""

from __future__ import annotations

import contextlib
import gzip
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.loading import load
from tb_memplugin.read.kineto.trace import trace_from_kineto
from tb_memplugin.trace import Category, Kind, MemoryTrace, Phase

KINETO = Path(__file__).parents[4] / "shared" / "data" / "kineto"
real = pytest.mark.skipif(not KINETO.is_dir(), reason=f"{KINETO} holds strangers' traces; it is absent")


def memory(line: str, **more: Any) -> dict[str, Any]:
    """`ts address bytes total [index]`, on the CPU unless told."""
    ts, address, size, total, *index = (int(word) for word in line.split())
    told = {"Addr": address, "Bytes": size, "Total Allocated": total, "Device Type": 0, "Device Id": -1}
    return {
        "ph": "i",
        "name": "[memory]",
        "pid": 1,
        "tid": 1,
        "ts": ts,
        "args": {**told, **({"Ev Idx": index[0]} if index else {}), **more},
    }


def ran(name: str, start: int, length: int, category: str = "cpu_op", **args: Any) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 1,
        "tid": 1,
        "ts": start,
        "dur": length,
        "args": args,
    }


def loaded(*events: dict[str, Any], **head: Any) -> MemoryTrace:
    return trace_from_kineto({"traceEvents": list(events), **head}, "x")


def test_events_come_in_the_order_of_time_and_index() -> None:
    trace = loaded(memory("5 30 7 19 9"), memory("5 20 2 12 8"), memory("1 10 10 10 99"))
    assert trace.events.bytes.tolist() == [10, 2, 7]
    assert trace.live(0).tolist() == [0, 10, 12, 19]
    assert trace.events.time_ns.tolist() == [1_000, 5_000, 5_000]


def test_what_was_alive_before_is_the_first_total_less_the_first_bytes() -> None:
    cuda = {"Device Type": 1, "Device Id": 1, "Total Reserved": 512}
    trace = loaded(memory("1 10 5 105", **cuda), memory("2 99 -30 75", **cuda))
    assert [device.name for device in trace.devices] == ["cuda:1"]
    assert trace.live(0).tolist() == [100, 105, 75]
    assert list(zip(trace.start.address.tolist(), trace.start.bytes.tolist(), strict=True)) == [
        (99, 30),
        (0, 70),
    ]
    assert trace.events.reserved.tolist() == [512, 512]
    assert trace.events.kind.tolist() == [Kind.ALLOC, Kind.FREE_COMPLETED]


def test_a_level_that_is_not_the_total_is_told() -> None:
    trace = loaded(memory("1 10 5 5"), memory("2 20 5 11"))
    assert any("after 1 of 2 events" in note and "1 bytes apart" in note for note in trace.notes)


def test_a_counter_of_the_cpu_that_stands_above_zero_is_told() -> None:
    assert any("counter is at 95 bytes" in note for note in loaded(memory("1 10 5 100")).notes)


def test_within_autograds_node_the_function_that_it_runs_is_the_operator() -> None:
    trace = loaded(
        ran("autograd::engine::evaluate_function: AddmmBackward0", 1, 50),
        ran("AddmmBackward0", 2, 20),
        ran("aten::mm", 3, 10),
        memory("5 10 8 8"),
        ran("aten::sum", 30, 5),
        memory("31 20 8 16"),
    )
    assert [trace.operators[row] for row in trace.events.operator] == ["AddmmBackward0", "aten::sum"]


def test_named_ranges_are_annotations_of_every_device() -> None:
    on_gpu = memory("30 20 7 7")
    on_gpu["args"] |= {"Device Type": 1, "Device Id": 0}
    trace = loaded(memory("5 10 8 8"), on_gpu, ran("load", 2, 20, "user_annotation"))
    assert trace.annotation_names == ("load",)
    assert trace.annotations.ends.tolist() == [0, 0, 1, 1]
    assert trace.annotations.device.tolist() == [0, 1, 0, 1]
    assert trace.annotations.event.tolist() == [-1, -1, 0, -1]


def test_times_count_from_the_base() -> None:
    trace = loaded(memory("1 10 5 5") | {"ts": 1.5}, ran("ProfilerStep#7", 0, 9), baseTimeNanoseconds=10**18)
    assert trace.events.time_ns.tolist() == [10**18 + 1_500]
    assert [(step.number, step.start_ns, step.end_ns) for step in trace.steps] == [
        (7, 10**18, 10**18 + 9_000)
    ]


def test_the_operator_that_was_called_and_the_innermost_module_own() -> None:
    trace = loaded(
        ran("train.py(3): main", 0, 100, "python_function"),
        ran("nn.Module: Net_0", 1, 50, "python_function"),
        ran("nn.Module: Linear_0", 2, 20, "python_function"),
        ran("aten::linear", 3, 10),
        ran("aten::empty", 4, 2),
        memory("5 10 8 8"),
        memory("9 10 -8 0"),
        memory("60 20 8 8"),
    )
    assert [trace.operators[row] for row in trace.events.operator] == [
        "aten::linear",
        "aten::linear",
        "(no operator)",
    ]
    assert [trace.modules[row].key for row in trace.events.module] == [
        "Linear_0",
        "Linear_0",
        "outside:(no operator)",
    ]
    assert [(one.key, one.parent, one.class_name) for one in trace.modules[:2]] == [
        ("Net_0", -1, "Net"),
        ("Linear_0", 0, "Linear"),
    ]
    assert trace.stacks[trace.events.stack[0]] == ("main train.py:3",)
    assert trace.events.category.tolist() == [Category.TEMPORARY, Category.UNKNOWN, Category.UNKNOWN]
    assert trace.events.phase.tolist() == [Phase.FORWARD, Phase.FORWARD, Phase.OTHER]
    assert trace.calls.depth.tolist() == [0, 1]


def test_phases_without_modules_come_from_autograd() -> None:
    trace = loaded(
        ran("aten::mm", 10, 5, "cpu_op", **{"Sequence number": 3, "Fwd thread id": 0}),
        ran("autograd::engine::evaluate_function: MmBackward0", 20, 5, "cpu_op", **{"Sequence number": 3}),
        ran("Optimizer.step#SGD.step", 30, 5, "user_annotation"),
        *(memory(f"{ts} {ts} 1 {row}") for row, ts in enumerate((1, 12, 22, 32, 40), 1)),
    )
    assert trace.events.phase.tolist() == [
        Phase.OTHER,
        Phase.FORWARD,
        Phase.BACKWARD,
        Phase.OPTIMIZER,
        Phase.OTHER,
    ]
    assert trace.modules[trace.events.module[2]].key == "outside:mm"


def test_a_failed_request_changes_nothing() -> None:
    oom = {**memory("2 0 999 5"), "name": "[OutOfMemory]"}
    trace = loaded(memory("1 10 5 5"), oom)
    assert trace.live(0).tolist() == [0, 5, 5]
    assert trace.events.kind.tolist() == [Kind.ALLOC, Kind.OOM]
    assert [(one.event, one.requested_bytes) for one in trace.ooms] == [(1, 999)]


def test_old_traces_have_sums_and_no_addresses() -> None:
    old = [
        {"ph": "i", "name": "[memory]", "ts": ts, "args": {"Bytes": size, "Device": -1}}
        for ts, size in enumerate((8, 8, -8, -30))
    ]
    trace = loaded(*old)
    assert trace.live(0).tolist() == [30, 38, 46, 38, 8]
    assert any("before 1.10" in note for note in trace.notes)


def test_memory_that_processes_share_is_a_device_of_its_own() -> None:
    trace = loaded(memory("1 10 5 5"), memory("2 90 700 0"), memory("3 10 -5 0"))
    assert [device.name for device in trace.devices] == ["cpu", "shared"]
    assert trace.live(0).tolist() == [0, 5, 5, 0]
    assert trace.live(1).tolist() == [0, 0, 700, 700]


def test_processes_whose_traces_were_put_into_one_file_keep_their_own_devices_and_counters() -> None:
    first = [memory("1 10 5 5"), memory("4 10 -5 0")]
    second = [{**memory("2 10 7 107"), "pid": 2}, {**memory("3 90 700 0"), "pid": 2}]
    gpu = {**memory("5 10 9 9", **{"Device Type": 1, "Device Id": 0}), "pid": 2}
    trace = loaded(*first, *second, gpu)
    names = [device.name for device in trace.devices]
    assert names == ["cpu (process 1)", "cpu (process 2)", "cuda:0", "shared (process 2)"]
    assert [trace.live(row)[-1] for row in range(4)] == [0, 107, 9, 700]
    assert not any("counter" in note and "up to" in note for note in trace.notes)


@pytest.mark.parametrize("number", ["GPU 3", None, -1, 1.5])
def test_a_device_whose_number_is_none_is_told(number: object) -> None:
    cuda = {"Device Type": 1}
    trace = loaded(
        memory("1 10 5 5", **cuda, **{"Device Id": 0}), memory("2 20 6 11", **cuda, **{"Device Id": number})
    )
    assert [device.name for device in trace.devices] == ["cuda:0"]
    assert trace.notes[0] == "1 memory events have no device number; taken as 0 (6 bytes)."


STRANGE: list[object] = [
    None,
    True,
    "x",
    "12",
    -1,
    1e300,
    float("nan"),
    float("inf"),
    1 << 70,
    -(1 << 64),
    [],
    {},
    [[]],
]


@pytest.mark.parametrize("field", ["ts", "args", "pid", "tid", "name", "cat", "ph", "dur"])
@pytest.mark.parametrize("value", STRANGE, ids=repr)
def test_a_strange_field_ends_in_a_trace_or_a_clear_error(field: str, value: object) -> None:
    for place in range(3):
        events = [memory("1 10 5 5"), memory("3 10 -5 0"), ran("aten::mm", 0, 9)]
        events[place][field] = value
        with contextlib.suppress(UnreadableFileError):
            assert loaded(*events).live(0).min() >= 0


@pytest.mark.parametrize("field", ["Addr", "Bytes", "Total Allocated", "Device Type", "Device Id", "Ev Idx"])
@pytest.mark.parametrize("value", STRANGE, ids=repr)
def test_a_strange_argument_ends_in_a_trace_or_a_clear_error(field: str, value: object) -> None:
    events = [memory("1 10 5 5"), memory("3 10 -5 0")]
    events[0]["args"][field] = value
    with contextlib.suppress(UnreadableFileError):
        assert loaded(*events).live(0).min() >= 0


@pytest.mark.parametrize("content", [None, 3, {}, [], {"traceEvents": 3}, {"traceEvents": [3, None]}])
def test_what_is_no_trace_is_refused(content: object) -> None:
    with pytest.raises(UnreadableFileError):
        trace_from_kineto(content, "x")


@real
@pytest.mark.parametrize(
    ("file", "peaks"), [("k1", {"cpu": 8, "cuda:1": 6629508096}), ("k4", {"cpu": 117349888})]
)
def test_every_level_of_a_real_trace_is_the_files_own_total(file: str, peaks: dict[str, int]) -> None:
    path = next(KINETO.glob(f"{file}_*"))
    trace = load(path)
    written = json.loads((gzip.decompress if path.suffix == ".gz" else bytes)(path.read_bytes()))
    found = [event for event in written["traceEvents"] if event["name"] == "[memory]"]
    found.sort(key=lambda event: (event["ts"], event["args"]["Ev Idx"]))
    totals = [event["args"]["Total Allocated"] for event in found]
    device = [0 if event["args"]["Device Type"] == 0 else 1 for event in found]
    level = np.stack([trace.live(row)[1:] for row in range(len(trace.devices))])
    assert level[device, np.arange(len(found))].tolist() == totals
    assert {one.name: int(trace.live(row).max()) for row, one in enumerate(trace.devices)} == peaks
    assert not any("apart" in note for note in trace.notes)


def test_numbers_that_no_dict_can_look_up_are_threads_like_others() -> None:
    """Multiples of 2**61 - 1 have one hash in Python: tens of thousands of them in a dict take minutes."""
    events = [memory(f"{row} {8 * row + 8} 8 {8 * row + 8}") for row in range(20_000)]
    for row, event in enumerate(events):
        event["tid"] = row * ((1 << 61) - 1)
    begin = time.process_time()
    trace = trace_from_kineto({"traceEvents": events}, "x")
    assert time.process_time() - begin < 10
    assert trace.live(0)[-1] == 160_000


def test_a_total_that_cannot_be_is_told() -> None:
    events = [memory(f"{row} {8 * row + 8} 8 {8 * row + 8}") for row in range(4)]
    events[1]["args"]["Total Allocated"] = "much"
    events[2]["args"].pop("Total Allocated")
    trace = trace_from_kineto({"traceEvents": events}, "x")
    assert trace.live(0).tolist() == [0, 8, 16, 24, 32]
    told = "2 memory events have no total, or an impossible one; it is not checked (16 bytes)."
    assert told in trace.notes


def test_what_is_no_event_is_told_with_the_bytes_by_which_the_counter_differs() -> None:
    """The second event has no size. By the counter it was 20 bytes, which the levels do not have."""
    events = [memory("1 10 8 8"), memory("2 20 20 28", Bytes=None), memory("3 30 4 32"), 7]
    trace = trace_from_kineto({"traceEvents": events}, "x")
    assert trace.live(0).tolist() == [0, 8, 12]
    assert trace.notes[0] == (
        "1 memory events have no size, and 1 traceEvents are not objects; left out: by the file's counters, "
        "up to 20 bytes of the levels are wrong."
    )


def test_what_is_no_event_is_told_where_no_counter_tells_its_bytes() -> None:
    events = [memory("1 10 8 8"), memory("2 20 20 28", Bytes=None), memory("3 10 -8 20")]
    for event in events:
        del event["args"]["Total Allocated"]
    trace = trace_from_kineto({"traceEvents": events}, "x")
    assert trace.notes[0] == (
        "1 memory events have no size, and 0 traceEvents are not objects; left out: no counter tells their "
        "bytes; the others have up to 8 bytes."
    )


def test_ranges_without_a_time_are_told_with_the_bytes_that_have_no_operator() -> None:
    nameless = {"ph": "X", "cat": "cpu_op", "ts": 1}
    trace = trace_from_kineto({"traceEvents": [memory("1 10 8 8"), nameless]}, "x")
    assert trace.notes[0] == (
        "1 operators and ranges have no name or time; left out: at most 8 bytes, those without an operator, "
        "are theirs."
    )


def test_a_gpus_sizes_are_those_of_whole_blocks_and_the_cpus_are_not() -> None:
    cuda = {"Device Type": 1, "Device Id": 0}
    trace = loaded(memory("1 10 512 1024", **cuda), memory("2 20 5 5"), memory("3 10 -512 512", **cuda))
    assert trace.events.rounded.tolist() == [512, -1, -1]
    assert (trace.start.bytes.tolist(), trace.start.rounded.tolist()) == ([512], [512])


def test_more_live_than_reserved_is_told() -> None:
    cuda = {"Device Type": 1, "Device Id": 0, "Total Reserved": 6}
    trace = loaded(memory("1 10 8 8", **cuda), memory("2 10 -8 0", **cuda))
    told = "cuda:0: after 1 of 2 events, more is live than the file reports as reserved, by up to 2 bytes."
    assert told in trace.notes


def test_what_was_left_out_is_told_where_nothing_remains() -> None:
    with pytest.raises(
        UnreadableFileError, match=r"no memory events\. 1 memory events have no size; left out."
    ):
        loaded(memory("1 10 5 5", Bytes=None))


def test_frees_that_no_event_reports_and_those_of_no_block_are_told_with_their_bytes() -> None:
    """The 10 bytes at 10 must be free when it is allocated again; nothing is at 30."""
    trace = loaded(memory("1 10 10 10"), memory("2 10 4 4"), memory("3 10 -4 0"), memory("4 10 -7 -7"))
    assert any("Blocks freed without an event: 1, of 10 bytes." in note for note in trace.notes)
    assert any("not alive, ignored: 1, of 7 bytes." in note for note in trace.notes)
