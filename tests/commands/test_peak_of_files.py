import json

import pytest

from tb_memplugin import load
from tb_memplugin.analysis.allocator import peak_split
from tb_memplugin.analysis.curves import event_curve
from tb_memplugin.analysis.moments import highest_within, peak
from tb_memplugin.analysis.peak_holders import peak_holders
from tb_memplugin.commands.divisions import shown_key
from tb_memplugin.commands.peak import trace_peak
from tb_memplugin.store.writer import RunWriter
from tests.commands.files import (
    DATA,
    FORWARD,
    failing_snapshot,
    real,
    refused,
    run,
    step_snapshot,
    stranger,
    told,
    write,
)
from tests.snapshots import entries, snapshot
from tests.traces import trace


@pytest.fixture
def step(tmp_path):
    return write(tmp_path / "step.pickle", step_snapshot())


def test_a_snapshot_is_told_as_a_recorded_step_is(step):
    (device,) = told("peak", step)["devices"]
    breakdown, largest, account = (device.pop(key) for key in ("breakdown", "largest", "account"))
    assert (account["level"], [one["moment"] for one in account["moments"]]) == ("not_known", ["end"])
    assert [block["bytes"] for block in largest] == [300, 90]
    assert largest[0]["why"] == "activation: allocated in the forward and not freed when its operator ended"
    assert sum(part["bytes"] for part in breakdown) == 390
    assert device == {
        "device": "cuda:0",
        "step": 0,
        "peak_bytes": 390,
        "window_peak_bytes": 390,
        "peak_event": 1,
        "peak_time_ns": 10_000,
        "start_bytes": 0,
        "end_bytes": 300,
        "peak_reserved_bytes": 2 << 20,
        "oom": None,
        "whole_device": None,
    }


@real
def test_the_peak_of_every_real_file_is_the_first_of_equals_in_every_view():
    recordings = [load(path) for path in sorted(DATA.glob("*/*"))]
    devices = [(each, row) for each in recordings for row in range(len(each.devices))]
    assert len(devices) >= 20
    for each, row in devices:
        levels = each.live(row).tolist()
        event = levels.index(max(levels)) - 1
        assert trace_peak(each, row, "category").peak_event == event
        assert peak(each, each.devices[row].name).event == event
        assert peak_holders(each, row).event == event
        assert peak_split(each, row).event == event
        assert event_curve(each, row, 0, len(each.events), 50).peak_event == event
        assert highest_within(each, row, (0, len(each.events) - 1)) == (max(levels), event)


@real
def test_an_event_has_one_number_in_all_commands_that_show_it():
    path = stranger("snapshots/01*")
    highest = told("advice", path)["peaks"][0]
    event, device = highest["event"], highest["device"]
    (state,) = told("allocator", path, "--at", event, "--device", device)["devices"]
    (shown,) = told("peak", path, "--device", device)["devices"]
    printed = run("trace", path, "--json", "--device", device).stdout.splitlines()
    events = {each["event"]: each for each in map(json.loads, printed)}
    address, earlier = events[event]["address"], [each for each in events if each < event]
    version = sum((events[each]["action"], events[each]["address"]) == ("alloc", address) for each in earlier)
    allocated = told("usage", path, "--allocation", f"{address:#x}_{version}", "--device", device)
    assert state["event"] == shown["peak_event"] == allocated["event"] == event
    assert events[event]["live_bytes"] == allocated["bytes_after"] == highest["bytes"] == shown["peak_bytes"]


def test_a_peak_that_is_reached_twice_is_shown_at_its_first_moment(tmp_path):
    lines = ("alloc 4096 90", "free_completed 4096 90", "alloc 8192 90", "free_completed 8192 90")
    rows = entries(*lines)
    rows[0]["frames"] = FORWARD
    path = write(tmp_path / "twice.pickle", snapshot([], rows))
    assert ", at event 0\n" in run("peak", path).stdout
    (device,) = told("peak", path, "--by", "line")["devices"]
    assert device["peak_event"] == 0
    assert [part["key"] for part in device["breakdown"]] == ["model.py:7 (forward)"]


def test_a_peak_before_the_first_event_has_no_number(tmp_path):
    rows = entries("free_requested 4096 90", "free_completed 4096 90")
    path = write(tmp_path / "state.pickle", snapshot([], rows))
    assert ", before the first event\n" in run("peak", path).stdout


@pytest.mark.parametrize(
    ("by", "parts"),
    [
        ("stack", {"at::empty ??:0\nforward model.py:7": 300, "step optim.py:3": 90}),
        ("line", {"model.py:7 (forward)": 300, "optim.py:3 (step)": 90}),
        ("context", {"(none)": 390}),
        ("stream", {"default stream": 390}),
    ],
)
def test_the_peak_divided_by_what_only_files_tell(step, by, parts):
    (device,) = told("peak", step, "--by", by)["devices"]
    assert {part["key"]: part["bytes"] for part in device["breakdown"]} == parts


def test_rules_name_what_they_find(step):
    (device,) = told("peak", step, "--by", "rule", "--rules", "Optimizer=optim")["devices"]
    assert [(part["key"], part["bytes"]) for part in device["breakdown"]] == [
        ("unknown", 300),
        ("Optimizer", 90),
    ]


def test_rules_alone_mean_by_rule(step):
    (device,) = told("peak", step, "--rules", "A=^forward$", "--rules", "B=.")["devices"]
    assert [(part["key"], part["bytes"]) for part in device["breakdown"]] == [("A", 300), ("B", 90)]


def test_rules_that_make_no_sense_are_refused(step):
    assert "This division needs rules" in refused("peak", step, "--by", "rule")
    assert "cannot be used with --by stack" in refused("peak", step, "--by", "stack", "--rules", "a=b")
    assert "Rule 'broken' is not a valid" in refused("peak", step, "--rules", "broken=(")


def test_the_request_that_failed_is_told_with_the_reason(tmp_path):
    (device,) = told("peak", write(tmp_path / "oom.pickle", failing_snapshot()))["devices"]
    oom = device["oom"]
    assert (oom["event"], oom["requested_bytes"], oom["free_bytes"]) == (1, 9000, 77)
    assert (oom["active_bytes"], oom["reserved_bytes"], oom["failed_requests"]) == (300, 2048, 1)
    assert oom["why"]


def test_people_read_where_the_peak_was_and_why_memory_ran_out(tmp_path, step):
    shown = run("peak", step, "--by", "stack").stdout
    assert "peak 390 B" in shown
    assert "forward model.py:7" in shown
    assert "at::empty" not in shown, "C++ frames are left out of the table where there are Python's"
    failing = write(tmp_path / "oom.pickle", failing_snapshot())
    assert "out of memory at event 1: " in run("peak", failing).stdout


def test_a_stack_is_shown_without_what_all_stacks_share():
    frames = [
        r"forward C:\work\net\layer.py:7",
        "_call_impl /lib/torch/nn/modules/module.py:1",
        "_wrapped_call_impl /lib/torch/nn/modules/module.py:2",
        "main /home/me/train.py:9",
        "PyObject_Call ??:0",
    ]
    assert shown_key("\n".join(frames)) == "forward net/layer.py:7 ← main me/train.py:9"
    assert shown_key(frames[3]) == frames[3]  # so stand lines, modules and operators
    assert shown_key("") == "(root)"


def test_a_stack_without_python_is_shown_where_it_differs_from_others():
    assert shown_key("torch::unwind::unwind ??:0\nat::empty ??:0\nmul ??:0") == "mul ??:0"
    assert shown_key("torch::unwind::unwind ??:0\nempty ??:0") == "torch::unwind::unwind ??:0 ← empty ??:0"


def test_a_recorded_window_is_a_file_too(tmp_path):
    written = RunWriter(str(tmp_path), "w").write(trace("step 3", "alloc 5 a", "step 4", "alloc 9 b"))
    assert [device["peak_bytes"] for device in told("peak", written.side_file)["devices"]] == [14]
    (third,) = told("peak", written.side_file, "--step", 3)["devices"]
    assert (third["step"], third["peak_bytes"]) == (3, 5)
    assert "Step 9 was not recorded" in refused("peak", written.side_file, "--step", 9)


def test_a_file_has_no_workers(step):
    assert "no workers" in refused("peak", step, "--worker", "rank0")


def test_an_empty_snapshot_has_no_device_and_is_no_error(tmp_path):
    empty = write(tmp_path / "empty.pickle", {"segments": [], "device_traces": []})
    assert told("peak", empty)["devices"] == []
    assert "no device" in run("peak", empty).stdout


@real
@pytest.mark.parametrize(
    ("file", "peaks"),
    [
        ("snapshots/01*", {"cuda:0": 8456473388, "cuda:1": 84063351764, "cuda:2": 21564645800}),
        ("snapshots/14*", {"cuda:0": 11840159744}),
        ("snapshots/16*", {"cuda:1": 3308174782}),
        ("snapshots/20*", {"cuda:0": 3249143816}),
        ("kineto/k1*", {"cpu": 8, "cuda:1": 6629508096}),
        ("kineto/k4*", {"cpu": 117349888}),
    ],
)
@pytest.mark.parametrize("by", ["stack", "line", "context", "pool", "category"])
def test_real_peaks_to_the_byte_and_parts_that_sum_to_them(file, peaks, by):
    devices = told("peak", stranger(file), "--by", by)["devices"]
    assert {device["device"]: device["peak_bytes"] for device in devices} == peaks
    assert [sum(part["bytes"] for part in device["breakdown"]) for device in devices] == list(peaks.values())


@real
def test_a_real_failed_request_is_told_on_its_device_alone():
    ooms = {device["device"]: device["oom"] for device in told("peak", stranger("snapshots/01*"))["devices"]}
    assert (ooms["cuda:0"], ooms["cuda:2"]) == (None, None)
    assert (ooms["cuda:1"]["requested_bytes"], ooms["cuda:1"]["free_bytes"]) == (5308694528, 95682560)


@real
def test_custom_rules_give_what_mosaic_gives_where_mosaic_is_right():
    rules = ("Forward=.*forward.*", "Optimizer=.*(optim|adam).*", "Backward=.*backward.*")
    asked = [word for rule in rules for word in ("--rules", rule)]
    (device,) = told("peak", stranger("snapshots/20*"), *asked)["devices"]
    assert {part["key"]: part["bytes"] for part in device["breakdown"]} == {
        "Backward": 2147483652,
        "unknown": 1101660164,
    }
