import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tb_memplugin.commands.import_ import run_folders, worker_name
from tb_memplugin.store.reader import read_recordings
from tb_memplugin.store.writer import RunWriter
from tests.commands.files import real, refused, run, step_snapshot, stranger, told, write
from tests.traces import trace

HOSTILE = ['<script>"x".pickle', "line\nbreak.json", "..pickle", "w" * 200 + ".pkl", "\x1b[31m.pickle"]


@pytest.fixture
def step(tmp_path):
    return write(tmp_path / "files" / "step.pickle", step_snapshot())


@pytest.fixture
def logdir(tmp_path):
    return tmp_path / "runs"


def recorded(logdir):
    """Run, worker and peak of everything in a logdir."""
    recordings = read_recordings(str(logdir))
    assert not recordings.problems
    return [
        (
            str(Path(step.folder).parent.relative_to(logdir)),
            step.metadata.worker,
            [device.stats.peak_bytes for device in step.metadata.devices],
        )
        for step in recordings.steps
    ]


def test_a_file_becomes_a_run_of_its_name(step, logdir):
    result = run("import", step, "--logdir", logdir)
    assert result.exit_code == 0
    assert "imported" in result.stdout
    assert "cuda:0 390 B" in result.stdout
    assert f"tensorboard --logdir {logdir}" in result.stdout
    assert recorded(logdir) == [("step", "step", [390])]
    assert told("peak", logdir, "--by", "line")["devices"][0]["breakdown"][0]["key"] == "model.py:7 (forward)"


def test_imported_again_it_replaces_what_it_gave_before(step, logdir):
    run("import", step, "--logdir", logdir)
    for kept in (400, 500, 600):
        write(step, step_snapshot(kept))
        (item,) = told("import", step, "--logdir", logdir)["imported"]
        assert item["replaced"]
        assert recorded(logdir) == [("step", "step", [kept + 90])]
    names = sorted(path.name for path in (logdir / "step").rglob("*") if path.is_file())
    assert [name.partition(".")[0] for name in names] == ["claimed", "events", "window-000000"]


def test_several_files_share_a_run_where_one_is_named(step, logdir, tmp_path):
    other = write(tmp_path / "files" / "other.pickle", step_snapshot(10))
    for _ in range(2):
        assert run("import", step, other, "--logdir", logdir, "--run", "jobs/one").exit_code == 0
        assert recorded(logdir) == [("jobs/one", "other", [100]), ("jobs/one", "step", [390])]


def test_files_of_one_name_both_stay_and_it_is_said(step, logdir, tmp_path):
    twin = write(tmp_path / "elsewhere" / "step.pickle", step_snapshot(10))
    result = run("import", step, twin, "--logdir", logdir)
    assert "so this one became worker 'step.2'" in result.stderr
    assert recorded(logdir) == [("step", "step", [390]), ("step", "step.2", [100])]
    write(twin, step_snapshot(20))
    run("import", twin, "--logdir", logdir)
    assert recorded(logdir) == [("step", "step", [390]), ("step", "step.2", [110])]


def test_a_recording_is_never_replaced(step, logdir):
    RunWriter(str(logdir / "job"), "step").write(trace("alloc 7 a"))
    (item,) = told("import", step, "--logdir", logdir, "--run", "job")["imported"]
    assert (item["worker"], item["replaced"]) == ("step.2", False)
    assert recorded(logdir) == [("job", "step", [7]), ("job", "step.2", [390])]


def test_a_file_given_twice_counts_once(step, logdir):
    assert len(told("import", step, step, "--logdir", logdir)["imported"]) == 1
    assert len(recorded(logdir)) == 1


def test_one_bad_file_does_not_stop_the_others(step, logdir, tmp_path):
    bad = tmp_path / "bad.pickle"
    bad.write_bytes(b"\x80\x04]")
    result = run("import", bad, step, tmp_path / "absent.json", "--logdir", logdir)
    assert result.exit_code == 2
    assert f"error: {bad}: " in result.stderr
    assert "file or folder does not exist" in result.stderr
    assert recorded(logdir) == [("step", "step", [390])]
    told_failures = json.loads(run("import", bad, step, "--logdir", logdir, "--json").stdout)["failed"]
    assert [item["where"] for item in told_failures] == [str(bad)]


def test_where_all_fail_nothing_is_touched(logdir, tmp_path):
    assert "file or folder does not exist" in refused("import", tmp_path / "absent.json", "--logdir", logdir)
    assert not logdir.exists()


def test_a_file_that_went_bad_leaves_what_it_gave_before(step, logdir):
    run("import", step, "--logdir", logdir)
    step.write_bytes(step.read_bytes()[:50])
    assert "truncated" in refused("import", step, "--logdir", logdir)
    assert recorded(logdir) == [("step", "step", [390])]


def test_packed_and_json_and_recorded_files(logdir, tmp_path):
    content = json.dumps(step_snapshot()).encode()
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(content))
    window = RunWriter(str(tmp_path / "old"), "rank3").write(
        trace("step 4", "alloc 5 a", "step 5", "alloc 6 b")
    )
    result = run("import", tmp_path / "a.json.gz", window.side_file, "--logdir", logdir)
    assert result.exit_code == 0, result.output
    assert recorded(logdir) == [
        ("a", "a", [390]),
        ("rank3.window-000000", "rank3.window-000000", [5]),
        ("rank3.window-000000", "rank3.window-000000", [11]),
    ]


def test_what_unpacks_to_more_than_the_limit_is_refused(logdir, tmp_path):
    bomb = tmp_path / "bomb.json.gz"
    bomb.write_bytes(gzip.compress(b"[" + b" " * 100_000))
    message = refused("import", bomb, "--logdir", logdir, "--limit-bytes", 1000)
    assert "larger than the limit of 1,000 bytes" in message


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such file names")
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_stay_in_the_logdir_and_off_the_terminal(logdir, tmp_path, name):
    result = run("import", write(tmp_path / "files" / name, step_snapshot()), "--logdir", logdir)
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.output
    assert len(recorded(logdir)) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"files", "runs"}


@pytest.mark.parametrize("name", ["../../out", "/etc", "a/../../b", "nul\0"])
def test_a_runs_name_cannot_leave_the_logdir(step, logdir, tmp_path, name):
    assert run("import", step, "--logdir", logdir, "--run", name).exit_code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"files", "runs"}


def test_a_run_without_a_name_is_refused(step, logdir):
    assert "name is empty" in refused("import", step, "--logdir", logdir, "--run", "/")
    assert run_folders("a/b") == ["a", "b"]


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("x/snapshot.pickle", "snapshot"),
        ("host_1.2.pt.trace.json.gz", "host_1.2"),
        ("t1.raw.json.gz", "t1"),
        ("s3://bucket/a/rank0.PICKLE", "rank0"),
        ("C:\\dumps\\oom.pickle", "oom"),
        (".pickle", ".pickle"),
        ("runs/r/rank1/plugins/tb_memplugin/window-000002.mem", "rank1.window-000002"),
    ],
)
def test_a_name_without_what_only_tells_the_format(source, name):
    assert worker_name(source) == name


def test_a_folder_that_cannot_be_written_is_refused_in_words(step, tmp_path):
    (tmp_path / "taken").write_text("a file")
    assert "could not be written" in refused("import", step, "--logdir", tmp_path / "taken")


def test_the_real_command_in_a_process_of_its_own(step, logdir):
    command = [
        str(Path(sys.executable).with_name("tb-memplugin")),
        "import",
        str(step),
        "--logdir",
        str(logdir),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert recorded(logdir) == [("step", "step", [390])]


@real
@pytest.mark.parametrize(
    ("pattern", "peaks"),
    [
        ("snapshots/01*", [8456473388, 84063351764, 21564645800]),
        ("snapshots/14*", [11840159744]),
        ("snapshots/16*", [3308174782]),
        ("snapshots/19*", []),
        ("kineto/k4*", [117349888]),
    ],
)
def test_real_files_keep_their_peaks(logdir, pattern, peaks):
    assert run("import", stranger(pattern), "--logdir", logdir).exit_code == 0
    assert [found for _, _, found in recorded(logdir)] == [peaks]


@real
def test_a_real_timeline_and_steps_of_a_real_trace(logdir):
    found = told("import", stranger("timeline/t1*"), stranger("kineto/k1*"), "--logdir", logdir)["imported"]
    assert max(device["peak_bytes"] for device in found[1]["devices"]) == 6629508096
    assert len(recorded(logdir)) == found[0]["steps"] + found[1]["steps"]
