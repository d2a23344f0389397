import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tb_memplugin.commands.tables import printable
from tb_memplugin.store.writer import RunWriter
from tb_memplugin.trace import Counter, CounterReading, DevicePart, Moment, WholeDevice
from tests.commands import files
from tests.commands.files import run
from tests.server.conftest import BASELINE, BIGGER
from tests.traces import EPOCH, trace


@pytest.fixture
def logdir(tmp_path):
    RunWriter(str(tmp_path / "baseline"), "rank0").write(BASELINE)
    return tmp_path


def told(*arguments):
    return files.told("peak", *arguments)


def test_json_is_what_the_issue_says(logdir):
    document = told(logdir)
    largest = document["devices"][0].pop("largest")
    assert largest[0] == {
        "bytes": 400,
        "address": 0x1000,
        "module": "layer",
        "operator": None,
        "name": "layer.weight",
        "tensor": None,
        "born_ns": None,
        "freed_ns": None,
        "module_confidence": 100,
        "category": "parameter",
        "phase": "before",
        "why": "parameter (layer.weight): the recording does not say why",
    }
    assert [block["bytes"] for block in largest] == [400, 100, 60]
    assert document == {
        "source": str(logdir / "baseline" / "rank0"),
        "devices": [
            {
                "device": "cpu",
                "step": 5,
                "peak_bytes": 560,
                "window_peak_bytes": 160,
                "peak_event": 3,
                "peak_time_ns": EPOCH + 3_500,
                "start_bytes": 400,
                "end_bytes": 460,
                "peak_reserved_bytes": None,
                "account": {
                    "level": "not_recorded",
                    "text": "not recorded: no counter was read, as in recordings of older versions",
                    "moments": [],
                },
                "whole_device": None,
                "oom": None,
                "breakdown": [
                    {"key": "parameter", "bytes": 400, "count": 1},
                    {"key": "activation", "bytes": 100, "count": 1},
                    {"key": "gradient", "bytes": 60, "count": 1},
                ],
            }
        ],
    }


@pytest.mark.parametrize("below", ["", "baseline", "baseline/rank0"])
def test_a_logdir_a_run_and_a_workers_folder_all_do(logdir, below):
    assert told(logdir / below)["devices"][0]["peak_bytes"] == 560


@pytest.mark.parametrize("by", ["category", "module", "operator", "phase"])
@pytest.mark.parametrize("top", [0, 1, 2, 10])
def test_every_breakdown_sums_to_the_peak(logdir, by, top):
    (device,) = told(logdir, "--by", by, "--top", top)["devices"]
    assert sum(part["bytes"] for part in device["breakdown"]) == device["peak_bytes"] == 560
    sizes = [part["bytes"] for part in device["breakdown"] if part["key"] != "(rest)"]
    assert sizes == sorted(sizes, reverse=True)


def test_what_is_below_the_top_is_one_row(logdir):
    (device,) = told(logdir, "--top", 1)["devices"]
    assert device["breakdown"] == [
        {"key": "parameter", "bytes": 400, "count": 1},
        {"key": "(rest)", "bytes": 160, "count": 2},
    ]


def test_a_step_can_be_chosen(logdir):
    (device,) = told(logdir, "--step", 6)["devices"]
    assert (device["step"], device["peak_bytes"], device["window_peak_bytes"]) == (6, 467, 67)


def test_every_device_is_told_each_at_its_own_peak(logdir):
    RunWriter(str(logdir / "bigger"), "rank0").write(BIGGER)
    devices = told(logdir / "bigger")["devices"]
    assert [(device["device"], device["peak_bytes"]) for device in devices] == [("cpu", 650), ("cuda:0", 64)]
    assert devices[1]["peak_reserved_bytes"] == 2048
    assert [device["device"] for device in told(logdir / "bigger", "--device", "cuda:0")["devices"]] == [
        "cuda:0"
    ]


def test_of_several_runs_the_highest_is_shown_and_the_others_are_named(logdir):
    RunWriter(str(logdir / "bigger"), "rank0").write(BIGGER)
    result = run("peak", logdir, "--json")
    assert json.loads(result.stdout)["source"].endswith("bigger/rank0")
    assert result.stderr.endswith(
        f"/bigger/rank0, which has the highest peak. To see another, give its folder, below {logdir}: "
        "baseline/rank0\n"
    )


def test_a_worker_can_be_chosen(logdir):
    RunWriter(str(logdir / "baseline"), "rank1").write(BIGGER)
    assert told(logdir, "--worker", "rank0")["devices"][0]["peak_bytes"] == 560
    assert told(logdir, "--worker", "rank1")["devices"][0]["peak_bytes"] == 650


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--step", 99), "Step 99 was not recorded"),
        (("--device", "cuda:9"), "cuda:9"),
        (("--worker", "nobody"), "nobody"),
    ],
)
def test_what_was_not_recorded_is_refused_with_the_choices(logdir, arguments, words):
    message = files.refused("peak", logdir, *arguments)
    assert words in message
    assert "Choose one of" in message


def test_a_folder_without_recordings_is_refused(tmp_path):
    assert "no memory recording" in files.refused("peak", tmp_path)
    assert "folder does not exist" in files.refused("peak", tmp_path / "absent")
    assert "path is empty" in files.refused("peak", "")


@pytest.mark.parametrize("path", ["x" * 5_000, "file/below"])
def test_a_path_that_cannot_be_is_not_called_a_lack_of_permission(tmp_path, path):
    (tmp_path / "file").touch()
    assert "fix: Check the path" in files.refused("peak", tmp_path / path)


def test_a_host_that_does_not_answer_is_no_traceback():
    """Port 9 discards, where anybody listens at all."""
    assert "cannot be reached" in files.refused("peak", "http://127.0.0.1:9/run")


def test_of_a_peak_that_is_reached_twice_the_first_moment_is_told_as_in_the_tab(tmp_path):
    twice = trace("alloc 50 a category=input", "free a", "alloc 50 b category=gradient")
    RunWriter(str(tmp_path), "rank0").write(twice)
    (device,) = told(tmp_path)["devices"]
    assert (device["peak_event"], device["breakdown"]) == (0, [{"key": "input", "bytes": 50, "count": 1}])


def test_without_its_side_file_a_step_has_its_figures_and_one_part_that_is_not_known(logdir):
    whole = told(logdir)
    (logdir / "baseline/rank0/plugins/tb_memplugin/window-000000.mem").unlink()
    result = run("peak", logdir, "--json")
    (device,), (known,) = json.loads(result.stdout)["devices"], whole["devices"]
    figures = ("device", "step", "peak_bytes", "window_peak_bytes", "peak_reserved_bytes")
    assert [device[name] for name in figures] == [known[name] for name in figures]
    assert device["breakdown"] == [{"key": "unknown", "bytes": 560, "count": 3}]
    assert "missing" in result.stderr
    assert "side file" in files.refused("peak", logdir, "--by", "stack")


def test_people_get_a_table_in_one_unit(logdir):
    result = run("peak", logdir, "--by", "module")
    assert result.exit_code == 0
    assert "peak 560 B" in result.stdout
    assert "layer" in result.stdout
    assert "total" in result.stdout


def test_names_cannot_steer_a_terminal_or_be_markup(tmp_path):
    evil = "[bold]\x1b[31mred\x07"
    RunWriter(str(tmp_path), evil).write(trace(f"alloc 5 a module={evil} operator={evil}"))
    for by in ("module", "operator"):
        result = run("peak", tmp_path, "--by", by)
        assert result.exit_code == 0, result.output
        assert "\x1b" not in result.output
        assert "\x07" not in result.output
        assert "[bold]\\x1b[31mred\\x07" in result.output


def test_a_damaged_file_beside_good_ones_is_a_warning(logdir):
    (path,) = (logdir / "baseline" / "rank0").glob("*tfevents*")
    path.write_bytes(path.read_bytes()[:-10])
    result = run("peak", logdir, "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["devices"][0]["peak_bytes"] == 560
    assert "ends unexpectedly" in result.stderr
    told = [line.split(":")[0] for line in result.stderr.splitlines()]
    assert told[:3] == ["warning", "  where", "  fix"]


def test_text_is_cut_and_what_cannot_be_seen_is_written_out():
    assert printable("a\nb\0", 10) == "a\\nb\\x00"
    assert printable("x" * 50, 10) == "x" * 9 + "…"


def test_help_imports_no_sub_command():
    for name in [name for name in sys.modules if name.startswith("tb_memplugin.commands.")]:
        del sys.modules[name]
    assert "doctor" in run("--help").stdout
    assert "tb_memplugin.commands.peak" not in sys.modules


HEAVY = {
    "torch",
    "tensorboard",
    "google.protobuf",
    "zstandard",
    "fsspec",
    "importlib.metadata",
    "rich.progress",
}


@pytest.mark.parametrize(
    ("arguments", "not_imported"),
    [
        (["--help"], {*HEAVY, "numpy", "rich", "difflib"}),
        (["peak", "FILE"], {*HEAVY, "rich"}),
        (["advice", "FILE"], {*HEAVY, "rich"}),
    ],
)
def test_a_command_imports_what_it_needs(tmp_path, arguments, not_imported):
    path = str(files.write(tmp_path / "a.pickle", files.step_snapshot()))
    program = f"""
import sys
from tb_memplugin.commands import main
main({[path if argument == "FILE" else argument for argument in arguments]}, standalone_mode=False)
print(*{not_imported} & set(sys.modules), file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-S", "-c", program],
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert "cuda:0" in done.stdout or "doctor" in done.stdout
    assert done.stderr.strip() == ""


def test_the_side_file_of_another_run_is_not_shown(logdir, tmp_path):
    later = replace(BASELINE, events=replace(BASELINE.events, time_ns=BASELINE.events.time_ns - 1_000))
    other = RunWriter(str(tmp_path / "other"), "rank0").write(later)
    ours = logdir / "baseline/rank0/plugins/tb_memplugin/window-000000.mem"
    shutil.copyfile(other.side_file, ours)
    result = run("peak", logdir / "baseline", "--by", "stack")
    assert (result.exit_code, "belongs to another window" in result.stderr) == (2, True)
    result = run("doctor", logdir / "baseline")
    assert (result.exit_code, "belongs to another window" in result.output) == (1, True)


def test_an_empty_event_file_is_named(tmp_path):
    path = Path(RunWriter(str(tmp_path), "rank0").write(BASELINE).event_file)
    path.write_bytes(b"")
    result = run("peak", tmp_path)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"warning: The event file is empty.\n  where: {path}\n")


@pytest.mark.parametrize("side_file", [True, False])
def test_the_account_of_the_window_is_a_line_and_numbers(tmp_path, side_file):
    """500 bytes at the peak, where the allocator has 625."""
    readings = (CounterReading(0, Moment.PEAK, Counter.ALLOCATED, 625),)
    written = RunWriter(str(tmp_path), "rank0").write(trace("alloc 500 a", counters=readings))
    if not side_file:
        Path(written.side_file).unlink()
    (device,) = told(tmp_path)["devices"]
    assert (device["account"]["level"], device["account"]["moments"][0]["missing_bytes"]) == (
        "different",
        125,
    )
    assert (
        "account of the window: accounts for 80.00 % of the allocator's bytes: 125 B missing at the peak"
        in run("peak", tmp_path).output
    )


@pytest.mark.parametrize("side_file", [True, False])
def test_what_fills_the_whole_device_is_a_line_and_numbers(tmp_path, side_file):
    parts = ((DevicePart.PROCESS, 600), (DevicePart.CHILDREN, 100), (DevicePart.FREE, 300))
    whole = WholeDevice(0, Moment.END, Moment.END, parts)
    written = RunWriter(str(tmp_path), "rank0").write(trace("alloc 500 a", whole_devices=(whole,)))
    if not side_file:
        Path(written.side_file).unlink()
    (device,) = told(tmp_path)["devices"]
    (moment,) = device["whole_device"]["moments"]
    assert [part["bytes"] for part in moment["parts"]] == [600, 100, 300]
    line = "the machine's memory at the window's end, 1,000 B: 600 B this process, 100 B its children"
    assert line in run("peak", tmp_path).output
