"""Scripts written for Mosaic run with the import changed, and say what our commands say."""

from __future__ import annotations

import gzip
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from tb_memplugin import MemPluginError, load
from tb_memplugin.analysis import peak, stages
from tb_memplugin.coming_from import mosaic
from tb_memplugin.coming_from.mosaic.__main__ import main as console
from tb_memplugin.coming_from.mosaic.libmosaic.analyzer.memory_snapshot import MemoryUsage
from tests.cli import CliRunner
from tests.commands.files import step_snapshot, write
from tests.snapshots import block, entries, segment, snapshot

PAGE = Path(__file__).parents[3] / "shared" / "seeds" / "mosaic.md"
SNAPSHOTS = Path(__file__).parents[3] / "shared" / "data" / "snapshots"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL) if PAGE.exists() else []
STAGES = [f"{name}_{stage}" for name in ("forward", "backward", "optimizer") for stage in ("START", "END")]


@pytest.fixture
def step(tmp_path, monkeypatch):
    """300 bytes stay of 390 at the peak; each of three annotations begins and ends, 5 µs apart."""
    notes = [
        {"device": 0, "name": key[: key.index("_")], "stage": key[key.index("_") + 1 :], "time_us": 5 * row}
        for row, key in enumerate(STAGES)
    ]
    monkeypatch.chdir(tmp_path)
    return write(tmp_path / "snapshot.pickle", step_snapshot(external_annotations=notes))


@pytest.mark.skipif(not EXAMPLES, reason="Mosaic's page is not on this machine")
@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_every_example_of_the_page_runs(step, number, capsys):
    code = EXAMPLES[number].replace("from mosaic.", "from tb_memplugin.coming_from.mosaic.")
    names: dict[str, object] = {"json": json}
    exec(code, names)  # the page is the project's own brief
    shown = capsys.readouterr().out
    if "memory_peak" in code:
        assert (names["peak_memory"], shown) == (390, "Peak memory: 0.00 GiB\n")
    elif "profile.html" in code:
        assert "Model Forward" in Path("profile.html").read_text("utf-8")
    else:
        told = [line.partition(":")[0] for line in shown.splitlines()]
        assert told == [*STAGES, *STAGES], "those that the function prints, and those of the example"


def test_an_example_was_found_for_each_of_the_three_ways():
    assert len(EXAMPLES) in (0, 3)


MOSAIC = {
    "get_memory_usage": "snapshot trace allocation action paste print_stack",
    "get_memory_usage_peak": (
        "snapshot trace allocation action paste print_stack upload_result start_time=None end_time=None"
    ),
    "get_memory_usage_diff": "snapshot_base snapshot_diff paste",
    "get_memory_usage_by_annotation_stage": "snapshot annotation paste",
    "get_memory_profile": (
        "snapshot out_path profile custom_profile=None sampling_rate=1 start_idx=0 "
        f"end_idx={sys.maxsize} preserve_allocation_order=False"
    ),
    "get_json_snapshot": "snapshot output_file upload_result",
}
"""Facts of Mosaic's `cmd/entry_point.py` (2026): its parameters in order, with the defaults that it has."""

MOSAIC_COMMANDS: dict[str, dict[str, object]] = {
    "mosaic_get_memory_profile": {
        "snapshot": None,
        "out_path": "snapshot_graph.html",
        "profile": "categories",
        "custom_profile": None,
        "plotter_sampling_rate": 1,
        "plotter_start_idx": 0,
        "plotter_end_idx": sys.maxsize,
    },
    "mosaic_get_json_snapshot": {
        "snapshot": None,
        "output_file": "/tmp/snapshot.json",
        "upload_result": False,
    },
    "mosaic_get_memory_usage": {
        "snapshot": None,
        "trace": "",
        "allocation": None,
        "action": "alloc",
        "print_stack": True,
        "paste": False,
    },
    "mosaic_get_memory_usage_peak": {
        "snapshot": None,
        "trace": "",
        "allocation": "",
        "action": "alloc",
        "print_stack": True,
        "paste": False,
        "upload_result": False,
        "start_time": None,
        "end_time": None,
    },
    "mosaic_get_memory_usage_diff": {"snapshot_base": None, "snapshot_diff": None, "paste": False},
    "mosaic_get_memory_usage_by_annotation_stage": {"snapshot": None, "annotation": None, "paste": False},
}
"""Facts of Mosaic's `cmd/get_*.py`: the options of its six commands and their defaults; None is required, or
no value. Its `--action` of the use is required, and its `--snapshot` mostly "", which no command can read."""

ACTIONS = ["alloc", "segment_alloc", "segment_map", "free_completed", "segment_free", "segment_unmap", "free"]
OTHER_NAMES = ["mosaic_get_memory", "mosaic-get-memory", "mosaic-get-json-snapshot"]
OTHER_NAMES += ["mosaic_usage_by_annotation_stage"]
"""Names of its page and its older setup.py."""


@pytest.mark.parametrize("name", MOSAIC)
def test_a_function_has_mosaics_parameters_in_mosaics_order_with_its_defaults(name):
    ours = inspect.signature(getattr(mosaic, name)).parameters
    facts = {part.partition("=")[0]: part.partition("=")[2] for part in MOSAIC[name].split()}
    assert list(ours) == list(facts)
    with_default = {key: text for key, text in facts.items() if text}
    assert {key: str(ours[key].default) for key in with_default} == with_default


@pytest.mark.parametrize("name", MOSAIC_COMMANDS)
def test_a_command_has_mosaics_options_with_its_defaults(name):
    command = console.get_command(click.Context(console), name)
    assert command is not None
    ours = {option.opts[0]: option for option in command.params}
    for fact, default in MOSAIC_COMMANDS[name].items():
        option = ours[f"--{fact}"]
        assert f"--{fact.replace('_', '-')}" in option.opts
        assert (None if option.required else option.to_info_dict()["default"]) == default
        if fact == "action":
            assert sorted(option.to_info_dict()["type"]["choices"]) == sorted(ACTIONS)


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_its_commands_have_their_other_names_too(name):
    assert console.get_command(click.Context(console), name) is not None


def shown(*arguments):
    done = CliRunner().invoke(console, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def test_its_six_commands_run(step):
    told = shown("mosaic_get_memory_usage_peak", "--snapshot", step)
    assert told.startswith(
        "Peak of cuda:0: 390 B, of which 0 B from before the recording\n\n300 B in 1 calls\n"
    )
    assert "forward model.py:7" in told
    told = shown("mosaic_get_memory_usage_peak", "--snapshot", step, "--print_stack", "False")
    assert told.count("\n") == 1
    told = shown(
        *("mosaic_get_memory_usage", "--snapshot", step, "--allocation", "1200_0"),
        *("--action", "free", "--print-stack", "false"),
    )
    assert told == "Live after free of 1200_0: 300 B\n"
    told = shown("mosaic_get_memory_usage_diff", "--snapshot-base", step, "--snapshot_diff", step)
    assert told == "No stack has more.\n"
    told = shown("mosaic_usage_by_annotation_stage", "--snapshot", step, "--annotation", "forward")
    assert told == "forward_START: 300 B (300 bytes)\nforward_END: 300 B (300 bytes)\n"
    shown("mosaic-get-memory", "--snapshot", step, "--out-path", "a.html", "--plotter_sampling_rate", 2)
    assert "the level after every 2 events" in Path("a.html").read_text("utf-8")
    shown("mosaic-get-json-snapshot", "--snapshot", step, "--output-file", "a.json")
    assert len(json.loads(Path("a.json").read_text("utf-8"))["device_traces"][0]) == 4


def test_the_console_says_what_is_wrong_without_a_traceback(tmp_path):
    program = [sys.executable, "-m", "tb_memplugin.coming_from.mosaic", "mosaic_get_memory_usage_peak"]
    done = subprocess.run(
        [*program, "--snapshot", str(tmp_path / "absent")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "No such file" in done.stderr
    assert "Traceback" not in done.stderr


def test_stages_are_those_of_the_analysis(step, capsys):
    found = mosaic.get_memory_usage_by_annotation_stage(step, "forw", paste=True)
    assert found == {
        "forward_START": ({"name": "forward", "device": 0, "stage": "START", "time_us": 0}, 300),
        "forward_END": ({"name": "forward", "device": 0, "stage": "END", "time_us": 5}, 300),
    }
    assert capsys.readouterr().out.splitlines()[0] == "forward_START: 300 B (300 bytes)"
    assert mosaic.get_memory_usage_by_annotation_stage(step, ("nothing",), False) == {}


def test_the_peak_and_the_use_are_in_the_snapshot_that_is_returned(step):
    """Called as Mosaic's own tests call it."""
    found = mosaic.get_memory_usage_peak(
        snapshot=step,
        trace="",
        allocation="",
        action="free",
        paste=False,
        print_stack=False,
        upload_result=False,
        start_time=None,
        end_time=None,
    ).memory_snapshot
    assert (found.memory_peak, found.dynamic_memory_peak, found.static_memory) == (390, 390, 0)
    assert found.max_allocation_info.to_str() == "alloc: 1200_0"
    sizes = [(event.mem_size, event.num_call) for event in found.call_stack_hash_set.values()]
    assert sizes == [(300, 1), (90, 1)]
    forward, _ = found.call_stack_hash_set.values()
    assert forward.mem_size_per_call == {0x1000: 300}
    assert forward.call_stack[-1] == {"name": "forward", "filename": "model.py", "line": 7}
    used = mosaic.get_memory_usage(step, "", "1200_0", "free_completed", False, True).memory_snapshot
    assert used.memory_usage == {"free_completed: 1200_0": 300}
    assert used.memory_peak == -1


def test_a_peak_up_to_an_allocation_or_within_times(step):
    up_to = mosaic.get_memory_usage_peak(step, allocation="1000_0", action="alloc")
    assert up_to.memory_snapshot.memory_peak == 300
    within = mosaic.get_memory_usage_peak(step, start_time=20, end_time=10**9, print_stack=False)
    assert within.memory_snapshot.memory_peak == 390
    after = mosaic.get_memory_usage_peak(step, start_time=30, end_time=40, print_stack=False)
    assert (after.memory_snapshot.memory_peak, after.memory_snapshot.max_allocation_info.action) == (
        390,
        "free_requested",
    )


def test_a_difference_is_what_the_other_peak_has_more(step, tmp_path):
    more = write(tmp_path / "more.pickle", step_snapshot(1000))
    (event,) = mosaic.get_memory_usage_diff(step, more, paste=False).values()
    assert (event.mem_size, event.num_call) == (700, 0)
    assert mosaic.get_memory_usage_diff(more, step) == {}


def test_a_segment_is_an_allocation_too(tmp_path):
    lines = entries("alloc 4096 300", "segment_alloc 8388608 2097152", "alloc 8388608 50")
    end = [
        segment(block(4096, 300), total=2 << 20),
        segment(block(8388608, 50), total=2 << 20),
    ]
    path = write(tmp_path / "grown.pickle", snapshot(end, lines))
    used = mosaic.get_memory_usage(path, "", "800000_0", "segment_alloc", False, False)
    assert used.memory_snapshot.memory_usage == {"segment_alloc: 800000_0": 300}
    with pytest.raises(MemPluginError, match="no segment_free at 0x800000_0"):
        mosaic.get_memory_usage(path, "", "800000_0", "segment_free", False, False)


def test_json_has_the_structure_of_the_snapshot(step):
    mosaic.get_json_snapshot(step, "out.json", upload_result=False)
    written = json.loads(Path("out.json").read_text("utf-8"))
    assert [entry["action"] for entry in written["device_traces"][0]][:2] == ["alloc", "alloc"]


@pytest.mark.parametrize("profile", ["annotations", "categories", "compile_context"])
def test_each_profile_is_a_page(step, profile):
    found = mosaic.get_memory_profile(str(step), "page.html", profile, None, 1, 0, 1, True)
    assert "events 0 to 1 of 4" in Path("page.html").read_text("utf-8")
    assert found.memory_snapshot.max_memory_usage.total_alloc == 390


def test_what_there_is_not_is_told(step):
    with pytest.raises(MemPluginError, match="no profile 'flame'"):
        mosaic.get_memory_profile(step, "page.html", "flame")
    with pytest.raises(MemPluginError, match="needs rules"):
        mosaic.get_memory_profile(step, "page.html", "custom")
    with pytest.raises(MemPluginError, match="has no event 4"):
        mosaic.get_memory_profile(step, "page.html", start_idx=4)
    with pytest.raises(MemPluginError, match="Nothing is uploaded"):
        mosaic.get_json_snapshot(step, "out.json", upload_result=True)
    with pytest.raises(MemPluginError, match="no action 'make'"):
        mosaic.get_memory_usage(step, "", "1200_0", "make")
    found = mosaic.MemoryAbstract(step)
    with pytest.raises(MemPluginError, match="No Kineto trace"):
        found.query_op("step", 1)
    with pytest.raises(MemPluginError, match="no memory abstract"):
        found.output_memory_abstract("out.json")
    Path("not.json").write_text("step")
    with pytest.raises(MemPluginError, match="not JSON"):
        found.load_memory_abstract("not.json")
    with pytest.raises(MemPluginError, match="has not been read"):
        found.memory_snapshot.analyze_memory_snapshot()
    found.load_memory_snapshot()
    with pytest.raises(MemPluginError, match="no analysis 'leaks'"):
        found.memory_snapshot.analyze_memory_snapshot("leaks")
    with pytest.raises(MemPluginError, match="no device 7"):
        found.memory_snapshot.stat_memory_usage_range(7)


def test_an_annotation_of_the_kineto_trace_is_found(step):
    """Mosaic reads compressed files alone, and leaves out what is no annotation of the user."""
    names = ["ProfilerStep#3", "Optimizer.step", "ProfilerStep#4", "ProfilerStep#5"]
    steps = [{"ph": "X", "cat": "user_annotation", "name": name, "ts": 1, "dur": 1} for name in names]
    events = [{"ph": "X", "cat": "cpu_op", "name": "ProfilerStep"}, {"ph": "M", "name": "x"}, *steps]
    for path, data in (("k.json.gz", gzip.compress), ("k.json", bytes)):
        Path(path).write_bytes(data(json.dumps({"schemaVersion": 1, "traceEvents": events}).encode()))
        found = mosaic.MemoryAbstract(step, path)
        assert found.query_op("ProfilerStep", 2) == [steps[0], steps[2]]
        found.load_gpu_trace()
        assert found.query_op("ProfilerStep", 0) == [steps[0], *steps[2:]]
        assert found.gpu_trace.query_op("Optimizer") == [steps[1]]
        assert found.gpu_trace.trace_data == {"schemaVersion": 1, "traceEvents": events}
        assert found.gpu_trace.trace_file_size == Path(path).stat().st_size / (1 << 20)


def test_a_memory_abstract_is_written_and_read(step):
    found = mosaic.MemoryAbstract(step)
    found.load_memory_abstract('{"peak": 390}')
    found.output_memory_abstract("out.json")
    other = mosaic.MemoryAbstract(step)
    other.load_memory_abstract("out.json")
    assert other.memory_abstract == {"peak": 390}


def test_the_use_within_a_range_is_told_event_by_event(step):
    found = mosaic.MemoryAbstract(step)
    assert found.memory_snapshot.snapshot_data == {}
    found.load_memory_snapshot()
    snapshot = found.memory_snapshot
    written = step_snapshot()["device_traces"][0]
    assert [entry["addr"] for entry in snapshot.snapshot_data["device_traces"][0]] == [
        entry["addr"] for entry in written
    ]
    snapshot.stat_memory_usage_range()
    assert [usage.value for usage in snapshot.memory_usage_history.values()] == [300, 390, 390, 300]
    assert snapshot.max_memory_usage == MemoryUsage(390)
    assert snapshot.call_stack[written[0]["time_us"]] == "??: 0<br>model.py: 7<br>"
    snapshot.stat_memory_usage_range(0, written[1]["time_us"], written[1]["time_us"])
    assert {time: usage / 10 for time, usage in snapshot.memory_usage_history.items()} == {
        written[1]["time_us"]: 39
    }


@pytest.mark.skipif(not SNAPSHOTS.is_dir(), reason="strangers' files are not on this machine")
def test_the_use_within_a_range_and_annotations_are_what_mosaic_answers():
    """By its rules, written anew apart from the package, on a file that begins with its process."""
    found = mosaic.MemoryAbstract(
        next(SNAPSHOTS.glob("01_*")), str(next((SNAPSHOTS.parent / "kineto").glob("k1_*")))
    )
    found.load_memory_snapshot()
    found.memory_snapshot.stat_memory_usage_range()
    history = found.memory_snapshot.memory_usage_history
    assert (len(history), found.memory_snapshot.max_memory_usage.value) == (4578, 8456473388)
    assert sum(usage.value for usage in history.values()) == 14986397405019
    assert [step["name"] for step in found.query_op("ProfilerStep", 3)] == [
        f"ProfilerStep#{number}" for number in (2, 3, 4)
    ]
    assert len(found.query_op("Optimizer", 0)) == 10


@pytest.mark.skipif(not SNAPSHOTS.is_dir(), reason="strangers' snapshots are not on this machine")
def test_of_several_devices_the_highest_is_taken_and_stages_are_of_the_one_that_has_them():
    path = next(SNAPSHOTS.glob("01_*"))
    found = mosaic.MemoryAbstract(memory_snapshot_file=str(path))
    found.load_memory_snapshot()
    found.memory_snapshot.analyze_memory_snapshot(opt="memory_peak")
    trace = load(path)
    assert found.memory_snapshot.memory_peak == max(
        peak(trace, device.name).bytes for device in trace.devices
    )
    by_key = mosaic.get_memory_usage_by_annotation_stage(path)
    assert {key: size for key, (_, size) in by_key.items()} == {
        stage.key: stage.bytes for stage in stages(trace) if stage.device == "cuda:0"
    }


@pytest.mark.skipif(not SNAPSHOTS.is_dir(), reason="strangers' snapshots are not on this machine")
def test_the_figures_of_its_own_tests():
    """Its test file, with 466 bytes from before the recording, which it leaves out."""
    path = next(SNAPSHOTS.glob("23_*"))
    whole = mosaic.get_memory_usage_peak(path, "", "", "free", False, False, False).memory_snapshot
    assert (whole.dynamic_memory_peak, whole.static_memory) == (2255398132, 466)
    assert whole.max_allocation_info.addr == "343e4b6023956"
    last = mosaic.get_memory_usage_peak(
        path, print_stack=False, start_time=1759252605604106, end_time=1759252631649942
    ).memory_snapshot
    assert (last.dynamic_memory_peak, last.max_allocation_info.addr) == (202846821, "231df1f389c4c")
    used = mosaic.get_memory_usage(path, "", "2263c194bda7_0", "free_completed", False, False)
    assert used.memory_snapshot.memory_usage == {"free_completed: 2263c194bda7_0": 1783600757 + 466}
    names = ("Annotation1", "Annotation2", "Annotation3")
    assert len(mosaic.get_memory_usage_by_annotation_stage(path, names, False)) == 6
