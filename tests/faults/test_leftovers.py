"""The next writer deletes what killed writers left, and nothing else."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tb_memplugin import MemPluginError
from tb_memplugin.exports.output import replacing
from tb_memplugin.store import disk_sync
from tb_memplugin.store.imports import write_import
from tb_memplugin.store.leftovers import clear_logdir
from tb_memplugin.store.reader import read_recordings
from tb_memplugin.store.records import records
from tb_memplugin.store.repair import repair
from tb_memplugin.store.writer import RunWriter
from tb_memplugin.temporary import UNKNOWN_SECONDS, has_ended, new_name, this_process
from tests.faults.failing_files import FOREVER, KILLED, FailingFiles, Fault
from tests.faults.test_faults import NEW, OLD, ORIGIN, RECORDERS, WINDOWS, Program, record_windows, run_killed

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def flushed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_sync, "in_background", lambda run: run())


def ended_process() -> str:
    """The text of `this_process` in a process that has ended."""
    code = "from tb_memplugin.temporary import this_process; print(this_process())"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def leftovers(logdir: str) -> list[str]:
    """The temporary files, and the side files that no step of their folder's event file names."""
    named = {step.side_file for step in read_recordings(logdir).steps}
    found = [path for path in Path(logdir).rglob("*") if path.name.endswith((".tmp", ".mem"))]
    return [
        str(path)
        for path in found
        if str(path) not in named and (path.suffix == ".tmp" or [*path.parents[2].glob("*tfevents*")])
    ]


@pytest.mark.parametrize("name", RECORDERS)
def test_the_next_recording_deletes_what_a_killed_one_left(tmp_path, monkeypatch, name):
    files = FailingFiles(str(tmp_path / "logdir"))
    files.install(monkeypatch, flushes=True)
    at, status, left = 0, KILLED, 0
    while status == KILLED:
        at += 2
        shutil.rmtree(files.root, ignore_errors=True)
        _, status = run_killed(RECORDERS[name], files, Fault("killed half", at=at))
        before = RECORDERS[name].read(files.root)
        left += bool(Path(files.root).exists() and leftovers(files.root))
        RECORDERS[name].run(Program(files.root, lambda _: None))
        assert leftovers(files.root) == [], at
        assert before.items() <= RECORDERS[name].read(files.root).items() or before == {}
    assert left > 3


def test_the_next_import_deletes_what_a_killed_one_left(tmp_path, monkeypatch):
    files = FailingFiles(str(tmp_path / "logdir"))
    files.install(monkeypatch)
    monkeypatch.setattr("tb_memplugin.store.imports.FILL_SECONDS", 0.0)
    at, status, left = 0, KILLED, 0
    while status == KILLED:
        at += 3
        shutil.rmtree(files.root, ignore_errors=True)
        write_import(files.root, "w", ORIGIN, OLD)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                with files.failing(Fault("killed half", at=at)):
                    write_import(files.root, "w", ORIGIN, NEW)
                status = 0
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        left += bool(leftovers(files.root))
        write_import(files.root, "w", ORIGIN, NEW)
        assert leftovers(files.root) == [], at
    assert left > 3


def test_the_empty_folder_of_an_import_killed_before_its_claim_goes_after_a_week(tmp_path):
    side = tmp_path / "w.v2/plugins/tb_memplugin"
    side.mkdir(parents=True)
    clear_logdir(str(tmp_path))
    assert side.is_dir()  # its writer may be about to claim it
    os.utime(side, (time.time() - UNKNOWN_SECONDS - 60,) * 2)
    clear_logdir(str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_the_next_export_deletes_what_a_killed_one_left(tmp_path):
    code = """
import os, sys
from tb_memplugin import MemPluginError
from tb_memplugin.exports.output import replacing
with replacing(sys.argv[1]) as stream:
    stream.write(b"half")
    stream.flush()
    os._exit(9)
"""
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path / "out")], check=False)
    assert killed.returncode == 9
    assert [path.name.endswith(".tmp") for path in tmp_path.iterdir()] == [True]
    mine = tmp_path / ".mine.tmp"
    mine.write_bytes(b"")
    with replacing(tmp_path / "other") as stream:
        stream.write(b"whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".mine.tmp", "other"]


def test_files_of_living_writers_and_of_others_stay(tmp_path):
    RunWriter(str(tmp_path), "w").write(WINDOWS[0])
    side, ended = tmp_path / "w/plugins/tb_memplugin", ended_process()
    elsewhere = f"{'f' * 16}.{ended.partition('.')[2]}"
    stay = [
        side / new_name(),  # of this process, which lives
        side / f".{elsewhere}.{'0' * 16}.tmp",  # of another machine
        side / f".{'0' * 16}.tmp",  # of an earlier version
        side / ".mine.tmp",
        side / f".{ended}.{'0' * 16}.tmp.txt",
        tmp_path / f".{ended}.{'0' * 16}.tmp",  # beside the folders of workers
        tmp_path / "data" / f".{ended}.{'0' * 16}.tmp",  # in a folder that is not ours
    ]
    (tmp_path / "data").mkdir()
    left = [side / f".{ended}.{'1' * 16}.tmp", tmp_path / "w" / f".{ended}.{'1' * 16}.tmp"]
    for path in (*stay, *left):
        path.write_bytes(b"half")
    clear_logdir(str(tmp_path))
    assert [path for path in stay if not path.exists()] == []
    assert [path for path in left if path.exists()] == []
    old = time.time() - UNKNOWN_SECONDS - 60
    for path in stay:
        os.utime(path, (old, old))
    clear_logdir(str(tmp_path))
    assert [path for path in stay if not path.exists()] == stay[1:3]


def run_of_an_ended_writer(folder: Path, monkeypatch) -> list[Path]:
    """Two windows of a writer that has ended, and a third of which only the side file is there."""
    with monkeypatch.context() as patched:
        patched.setattr("tb_memplugin.store.worker_folder.this_process", ended_process)
        record_windows(Program(str(folder), lambda _: None))
    side = folder / "rank0/plugins/tb_memplugin"
    third = side / "window-000003.mem"
    third.write_bytes((side / "window-000002.mem").read_bytes())
    return sorted(side.glob("*.mem"))


def test_a_side_file_without_a_step_is_deleted_if_its_writer_has_ended(tmp_path, monkeypatch):
    windows = run_of_an_ended_writer(tmp_path, monkeypatch)
    clear_logdir(str(tmp_path))
    assert [path for path in windows if path.exists()] == windows[:3]


def test_the_side_file_of_a_failed_window_is_deleted_if_a_later_window_has_steps(tmp_path, monkeypatch):
    files = FailingFiles(str(tmp_path))
    files.install(monkeypatch)
    unlink = os.unlink

    def refused(path):
        if str(path).endswith(".mem"):
            raise PermissionError(errno.EACCES, "refused")
        unlink(path)

    with monkeypatch.context() as patched:
        patched.setattr("tb_memplugin.store.worker_folder.this_process", ended_process)
        patched.setattr(os, "unlink", refused)
        writer = RunWriter(files.root, "rank0")
        writer.write(WINDOWS[0])
        fault = Fault("refused", errno.EIO, at=1, lasts=FOREVER, only="tfevents", operation="write")
        with files.failing(fault), pytest.raises(MemPluginError):
            writer.write(WINDOWS[1])
        writer.write(WINDOWS[2])
    assert [Path(path).name for path in leftovers(files.root)] == ["window-000001.mem"]
    clear_logdir(files.root)
    assert leftovers(files.root) == []
    assert RECORDERS["handler"].read(files.root) == {"rank0": {0: 100, 1: 7, 4: 102, 5: 7}}


def test_the_only_side_file_stays_where_the_event_file_is_gone(tmp_path, monkeypatch):
    """It is all that is left of a recording of one window: `doctor --repair` makes steps of it."""
    with monkeypatch.context() as patched:
        patched.setattr("tb_memplugin.store.worker_folder.this_process", ended_process)
        Path(RunWriter(str(tmp_path), "rank0").write(WINDOWS[0]).event_file).unlink()
    RunWriter(str(tmp_path), "rank1").write(WINDOWS[0])
    (repaired,) = repair(str(tmp_path))
    assert (repaired.records, repaired.steps) == (0, 2)
    assert RECORDERS["handler"].read(str(tmp_path))["rank0"] == {0: 100, 1: 7}


@pytest.mark.parametrize("kept", ["nothing", "the first window"])
def test_where_several_windows_at_the_end_have_no_step_their_side_files_stay(tmp_path, monkeypatch, kept):
    """As in a copy of a folder that was written to meanwhile: `doctor --repair` makes steps of them."""
    windows = run_of_an_ended_writer(tmp_path, monkeypatch)
    (events,) = tmp_path.glob("rank0/*tb_memplugin")
    content = events.read_bytes()
    ends = [end for _, _, end in records(lambda at, size: content[at : at + size], len(content))]
    if kept == "nothing":
        events.unlink()
    else:
        os.truncate(events, ends[2])
    clear_logdir(str(tmp_path))
    assert [path for path in windows if path.exists()] == windows


def test_beside_a_second_event_file_every_side_file_stays(tmp_path, monkeypatch):
    """Its writer goes on in it if someone else changed the first."""
    windows = run_of_an_ended_writer(tmp_path, monkeypatch)
    (events,) = tmp_path.glob("rank0/*tb_memplugin")
    (events.parent / events.name.replace(".000000.", ".000001.")).write_bytes(events.read_bytes())
    clear_logdir(str(tmp_path))
    assert [path for path in windows if path.exists()] == windows


def test_beside_a_damaged_event_file_every_side_file_stays(tmp_path, monkeypatch):
    windows = run_of_an_ended_writer(tmp_path, monkeypatch)
    (events,) = tmp_path.glob("rank0/*tb_memplugin")
    whole = events.read_bytes()
    for at in range(0, len(whole), 99):
        content = bytearray(whole)
        content[at] ^= 1
        events.write_bytes(content)
        os.utime(events, (0, 0))
        clear_logdir(str(tmp_path))
        assert all(path.exists() for path in windows), at


def test_a_living_writer_keeps_its_newest_side_file(tmp_path):
    record_windows(Program(str(tmp_path), lambda _: None))
    newest = tmp_path / "rank0/plugins/tb_memplugin/window-000003.mem"
    newest.write_bytes(b"the window that is being written")
    clear_logdir(str(tmp_path))
    assert newest.exists()


def test_a_process_has_ended_or_not_or_nothing_is_known():
    assert not has_ended(this_process())
    assert has_ended(ended_process())
    assert not has_ended(f"{'f' * 16}.1")
    assert not has_ended("")
