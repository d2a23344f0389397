"""`tb-memplugin view` serves files; `ranks` lists the workers of a run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from tb_memplugin.store.writer import RunWriter
from tb_memplugin.temporary import this_process
from tests.commands.files import refused, run, step_snapshot, write
from tests.traces import trace

ROOT = Path(__file__).resolve().parents[2]

VIEW = "import sys; from tb_memplugin.commands import main; sys.executable = sys.argv.pop(1); main()"

SLOW_IMPORT = f"""#!{sys.executable}
import pathlib, sys, time
from tb_memplugin.commands.apart import fork_guarded

fork_guarded()
print("importing", file=sys.stderr, flush=True)
time.sleep(5)
pathlib.Path(sys.argv[-3], "run").mkdir(parents=True)
"""


def _heeds_a_hang_up() -> None:
    """Undo `nohup`, which a test run may have been started with."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_view_serves_a_file_and_leaves_nothing(tmp_path: Path, ended_by: signal.Signals) -> None:
    file = write(tmp_path / "one.pickle", step_snapshot())
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [sys.executable, "-m", "tb_memplugin", "view", str(file)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=_heeds_a_hang_up,
    ) as viewing:
        try:
            assert viewing.stdout is not None
            address = re.match(r"Open (http://localhost:\d+)/#tb_memplugin ", viewing.stdout.readline())
            assert address is not None
            with urllib.request.urlopen(f"{address[1]}/data/plugin/tb_memplugin/runs", timeout=60) as answer:
                assert "one" in answer.read().decode()
        finally:
            viewing.send_signal(ended_by)
    assert viewing.returncode == 0
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("tb_memplugin")] == []


@pytest.mark.parametrize("ended_by", [signal.SIGTERM, signal.SIGHUP])
def test_view_that_is_ended_while_it_imports_leaves_nothing(tmp_path: Path, ended_by: signal.Signals) -> None:
    slow = tmp_path / "python"
    slow.write_text(SLOW_IMPORT)
    slow.chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, "-c", VIEW, slow, "view", "a.pickle"],
        env=environment,
        stderr=subprocess.PIPE,
        preexec_fn=_heeds_a_hang_up,
    ) as viewing:
        assert viewing.stderr is not None
        viewing.stderr.readline()  # the folder is there, and the import runs
        viewing.send_signal(ended_by)
        viewing.communicate(timeout=60)  # until every process has ended that can write to stderr
    assert viewing.returncode == 1
    assert list(tmp_path.glob("tb_memplugin-*")) == []


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels tell no child that its parent was killed")
def test_a_view_that_is_killed_leaves_no_tensorboard(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "tb_memplugin", "view", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as viewing:
        assert viewing.stdout is not None
        assert viewing.stdout.readline().startswith("Open ")
        viewing.kill()
        try:
            viewing.communicate(timeout=20)  # until TensorBoard has ended, which can write there, too
        finally:
            with suppress(ProcessLookupError):
                os.killpg(viewing.pid, signal.SIGKILL)


def test_the_next_view_deletes_what_killed_ones_left(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    killed = f"{this_process().partition('.')[0]}.{ended.pid}"
    elsewhere = f"{'0' * 16}.{ended.pid}"
    for process in (killed, this_process(), elsewhere):
        (tmp_path / f"tb_memplugin-{process}-x" / "run").mkdir(parents=True)
    _view_of_nothing(tmp_path)
    left = {f"tb_memplugin-{process}-x" for process in (this_process(), elsewhere)}
    assert {path.name for path in tmp_path.glob("tb_memplugin*")} == left


def test_view_refuses_what_is_no_recording(tmp_path: Path) -> None:
    done = _view_of_nothing(tmp_path)
    assert done.returncode == 2
    assert "wrong.pickle" in done.stderr


def _view_of_nothing(folder: Path) -> subprocess.CompletedProcess[str]:
    wrong = folder / "wrong.pickle"
    wrong.write_bytes(b"nothing")
    return subprocess.run(
        [sys.executable, "-m", "tb_memplugin", "view", str(wrong)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def logdir(tmp_path: Path) -> Path:
    """Three ranks whose peaks are 390, 490 and 990 bytes."""
    files = [
        write(tmp_path / f"rank{rank}.pickle", step_snapshot(kept))
        for rank, kept in enumerate((300, 400, 900))
    ]
    assert run("import", *files, "--logdir", tmp_path / "runs", "--run", "job").exit_code == 0
    return tmp_path / "runs"


def test_ranks_come_with_the_highest_first(logdir: Path) -> None:
    lines = run("ranks", logdir).stdout.splitlines()
    rows = [line.split() for line in lines if line.strip().startswith("rank")][1:]
    assert [(row[0], row[2]) for row in rows] == [("rank2", "990"), ("rank1", "490"), ("rank0", "390")]
    assert "+102.0 % (rank1)" in "\n".join(lines)


def test_devices_of_one_worker_are_compared_by_their_own_names(tmp_path: Path) -> None:
    recorded = trace("step 0", "alloc 100 a device=cuda:0", "alloc 300 b device=cuda:1")
    RunWriter(str(tmp_path), "job").write(recorded)
    assert "+200.0 % (cuda:0)" in run("ranks", tmp_path).stdout


def test_json_tells_ranks_in_bytes(logdir: Path) -> None:
    ranks = json.loads(run("ranks", logdir, "--json").stdout)["ranks"]
    assert [(rank["worker"], rank["highest_bytes"], rank["median_bytes"]) for rank in ranks] == [
        ("rank2", 990, 490),
        ("rank1", 490, 490),
        ("rank0", 390, 490),
    ]


def test_a_rank_is_compared_with_devices_of_its_type(logdir: Path, tmp_path: Path) -> None:
    """As a process, whose memory is not that of its tensors."""
    file = write(tmp_path / "rank3.pickle", step_snapshot(9_900))
    arguments = ("--logdir", logdir, "--run", "job", "--device-type", "xpu")
    assert run("import", file, *arguments).exit_code == 0
    ranks = json.loads(run("ranks", logdir, "--json").stdout)["ranks"]
    medians = [(rank["device"], rank["median_device"], rank["median_bytes"]) for rank in ranks]
    assert medians == [("xpu:0", None, None), *[("cuda:0", "cuda:0", 490)] * 3]


def test_a_folder_without_recordings_is_refused(tmp_path: Path) -> None:
    assert "This folder has no recording" in refused("ranks", tmp_path)
