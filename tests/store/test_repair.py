"""What is intact of a damaged recording is saved, and nothing is lost meanwhile."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from tb_memplugin.commands.doctor import command
from tb_memplugin.store.imports import write_import
from tb_memplugin.store.paths import CLAIM, SIDE_FOLDER
from tb_memplugin.store.reader import load_window, read_recordings
from tb_memplugin.store.records import record, records
from tb_memplugin.store.repair import QUIET_SECONDS, repair
from tb_memplugin.store.writer import RunWriter, StepsWriter
from tests.cli import CliRunner
from tests.faults.failing_files import FailingFiles, Fault
from tests.flushing import wait_for_the_disk
from tests.server.tab import Tab
from tests.special_files import KINDS
from tests.step_figures import figures
from tests.traces import EPOCH, trace

WINDOWS = [trace(f"step {2 * n}", f"alloc {100 + n} a", f"step {2 * n + 1}", "alloc 7 b") for n in range(4)]
PEAKS = {step: 100 + step // 2 if step % 2 == 0 else 107 + step // 2 for step in range(8)}
"""The peak of each step: of an odd one, the block of the step before lives on."""

ELSEWHERE = "0123456789abcdef.1"
"""The process of another machine."""


def recorded(logdir: Path) -> Path:
    """Record four windows on another machine, long ago. Return the event file."""
    writer = RunWriter(str(logdir), "w")
    path = Path([writer.write(window).event_file for window in WINDOWS][-1])
    claim_elsewhere(logdir / "w")
    return path


def claim_elsewhere(folder: Path) -> None:
    wait_for_the_disk()  # its thread reads and clears the folder
    claim = folder / "plugins/tb_memplugin/claimed"
    writer_id, _, origin = claim.read_text().partition(" ")
    claim.write_text(f"{writer_id} {ELSEWHERE}\n{origin.partition(chr(10))[2]}")
    aged(folder)


def aged(folder: Path) -> None:
    """Let everything in a folder be older than files that may still be written."""
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (0, path.stat().st_mtime - 2 * QUIET_SECONDS))


def damage(path: Path, at: int) -> bytes:
    """Flip a bit in the record of a file with this number. Return the damaged content."""
    content = bytearray(path.read_bytes())
    read = lambda offset, count: bytes(content[offset : offset + count])  # noqa: E731
    content[list(records(read, len(content)))[at][1] + 20] ^= 1
    path.write_bytes(content)
    aged(path.parent)
    return bytes(content)


def peaks(logdir: Path) -> dict[int, int]:
    steps = read_recordings(str(logdir)).steps
    found = {step.metadata.step: step.summary().devices[0].stats.peak_bytes for step in steps}
    assert len(found) == len(steps)
    return found


def contents(folder: Path) -> set[bytes]:
    return {path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_all_that_a_damaged_file_and_side_files_have_is_saved_and_nothing_is_deleted(tmp_path):
    path = recorded(tmp_path)
    damage(path, 3)  # step 2 of window 1
    before = contents(tmp_path)
    assert peaks(tmp_path).keys() == PEAKS.keys() - {2}
    (done,) = repair(str(tmp_path))
    assert (done.records, done.steps) == (7, 1)
    assert peaks(tmp_path) == PEAKS
    assert read_recordings(str(tmp_path)).problems == ()
    assert before <= contents(tmp_path)
    assert [Path(kept).read_bytes() in before for kept in done.kept] == [True]
    assert list(repair(str(tmp_path))) == []


def test_what_was_rebuilt_is_what_was_recorded(tmp_path):
    path = recorded(tmp_path)
    original = {step.metadata.step: step for step in read_recordings(str(tmp_path)).steps}
    path.write_bytes(path.read_bytes()[:70])  # not one step is left
    aged(tmp_path)
    (done,) = repair(str(tmp_path))
    assert (done.records, done.steps) == (0, 8)
    for step in read_recordings(str(tmp_path)).steps:
        assert step.metadata == original[step.metadata.step].metadata
        assert step.blob == original[step.metadata.step].blob


@pytest.mark.parametrize("claim", ["as it was", None, b"", bytes(60), b"\x93junk 1"])
def test_event_files_that_were_not_copied_are_rebuilt_from_side_files(tmp_path, claim):
    path = recorded(tmp_path)
    path.unlink()
    if claim != "as it was":
        (path.parent / SIDE_FOLDER / CLAIM).unlink()
    if isinstance(claim, bytes):
        (path.parent / SIDE_FOLDER / CLAIM).write_bytes(claim)
    aged(tmp_path)
    (done,) = repair(str(tmp_path))
    assert (done.records, done.steps, done.kept) == (0, 8, ())
    assert peaks(tmp_path) == PEAKS
    for step in read_recordings(str(tmp_path)).steps:
        load_window(str(step.side_file), step.metadata).step_row(step.metadata.step)


def test_steps_of_a_side_file_keep_their_worker_beside_a_strangers_record(tmp_path):
    path = recorded(tmp_path)
    other = Path(RunWriter(str(tmp_path), "x").write(WINDOWS[0]).event_file)
    path.write_bytes(path.read_bytes()[:70] + other.read_bytes())  # of w, not one step is left
    aged(tmp_path)
    assert sum(done.steps for done in repair(str(tmp_path))) == 8
    steps = read_recordings(str(tmp_path / "w")).steps
    assert sorted(step.metadata.worker for step in steps) == ["w"] * 8 + ["x"] * 2


def test_steps_of_a_monitor_keep_their_order_around_a_damaged_record(tmp_path):
    writer = StepsWriter(str(tmp_path), "w", EPOCH)
    written = [writer.write(figures([10 + first, 11 + first], first=first)) for first in range(0, 8, 2)]
    path = Path(written[0])
    claim_elsewhere(tmp_path / "w.steps")
    damage(path, 1 + 3)  # the record of steps 2 and 3: the first two steps have scalars
    (watched,) = read_recordings(str(tmp_path)).watched
    assert watched.figures.steps.tolist() == [0, 1, 4, 5, 6, 7]
    (done,) = repair(str(tmp_path))
    assert (done.records, done.steps) == (3, 0)
    (watched,) = read_recordings(str(tmp_path)).watched
    assert watched.figures.devices[0].peak.tolist() == [10, 11, 14, 15, 16, 17]
    assert read_recordings(str(tmp_path)).problems == ()


def test_an_import_is_repaired_as_the_import_that_it_was(tmp_path):
    path = Path(write_import(str(tmp_path), "w", "/a.pickle", WINDOWS[0]).written.event_file)
    claim_elsewhere(tmp_path / "w")
    damage(path, 1)
    (done,) = repair(str(tmp_path))
    assert (done.records, done.steps) == (1, 1)
    assert peaks(tmp_path) == {0: 100, 1: 107}
    assert write_import(str(tmp_path), "w", "/a.pickle", WINDOWS[1]).replaced
    assert peaks(tmp_path) == {2: 101, 3: 108}


@pytest.mark.parametrize("who", ["this process", "another machine's"])
def test_what_a_process_may_still_write_is_left_alone(tmp_path, who):
    path = Path(RunWriter(str(tmp_path), "w").write(WINDOWS[0]).event_file)
    if who == "another machine's":
        claim_elsewhere(path.parent)
    damage(path, 1)
    if who == "another machine's":
        os.utime(path)
    before = contents(tmp_path)
    assert [done.waits for done in repair(str(tmp_path))] == [True]
    assert contents(tmp_path) == before


def test_an_undamaged_logdir_is_left_alone(tmp_path):
    recorded(tmp_path)
    before = contents(tmp_path)
    assert list(repair(str(tmp_path))) == []
    assert contents(tmp_path) == before


def test_records_of_strangers_are_left_out(tmp_path):
    path = recorded(tmp_path)
    path.write_bytes(path.read_bytes() + record(b"\xff not an event"))
    aged(tmp_path)
    (problem,) = read_recordings(str(tmp_path)).problems
    assert problem.what == "A record is not an event."
    (done,) = repair(str(tmp_path))
    assert (done.records, done.steps) == (8, 0)
    assert peaks(tmp_path) == PEAKS
    assert read_recordings(str(tmp_path)).problems == ()


@pytest.mark.parametrize("kind", ["refused", "answer lost", "half written"])
def test_whatever_fails_while_it_is_repaired_nothing_is_lost_and_it_can_be_repeated(
    tmp_path, monkeypatch, kind
):
    before = damage(recorded(tmp_path / "whole"), 3)
    files = FailingFiles(str(tmp_path))
    files.install(monkeypatch)
    files.install_reads(monkeypatch)
    at, failed = 0, 0
    while files.hit or not at:
        at += 1
        logdir = tmp_path / str(at)
        shutil.copytree(tmp_path / "whole", logdir)
        aged(logdir / "w")
        with files.failing(Fault(kind, errno.EIO, at)):
            failed += any(done.failed for done in repair(str(logdir)))
        assert peaks(logdir).items() >= {step: PEAKS[step] for step in PEAKS if step != 2}.items()
        assert before in contents(logdir)
        aged(logdir / "w")
        list(repair(str(logdir)))
        assert peaks(logdir) == PEAKS
        assert read_recordings(str(logdir)).problems == ()
        shutil.rmtree(logdir)
    assert at > 40
    assert failed > 10


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_a_killed_repair_left_is_deleted_by_the_next(tmp_path):
    damage(recorded(tmp_path), 3)
    child = os.fork()
    if child == 0:
        os.link = lambda *_, **__: os._exit(0)
        list(repair(str(tmp_path)))
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(tmp_path.rglob("*.tmp"))) == 1
    assert len(list(repair(str(tmp_path)))) == 1
    assert list(tmp_path.rglob("*.tmp")) == []
    assert peaks(tmp_path) == PEAKS


def test_an_event_file_that_cannot_be_read_is_named_and_the_others_are_repaired(tmp_path):
    for run in ("a", "b"):
        damage(recorded(tmp_path / run), 3)
    pipe = tmp_path / "a/w/events.out.tfevents.9.tb_memplugin"
    os.mkfifo(pipe)
    aged(tmp_path)
    first, named, second = sorted(repair(str(tmp_path)), key=lambda done: done.folder)
    assert named.failed is not None
    assert (named.folder, named.failed.strerror, named.records) == (str(pipe), "it is a pipe, not a file", 0)
    assert (first.folder, first.failed, first.records, first.steps) == (str(tmp_path / "a/w"), None, 7, 0)
    assert (second.failed, second.records, second.steps) == (None, 7, 1)
    assert peaks(tmp_path / "a").keys() == PEAKS.keys() - {2}  # which may be in the pipe
    done = CliRunner().invoke(command, [str(tmp_path), "--repair"])
    assert f"{pipe} was not repaired: it is a pipe, not a file." in done.output


@pytest.mark.parametrize("kind", KINDS)
def test_a_claim_that_is_no_file_keeps_nothing_from_being_saved(tmp_path, kind):
    damage(recorded(tmp_path), 3)
    claim = tmp_path / "w/plugins/tb_memplugin/claimed"
    claim.unlink()
    KINDS[kind](claim)
    os.utime(claim.parent, (0, claim.parent.stat().st_mtime - 2 * QUIET_SECONDS))
    (done,) = repair(str(tmp_path))
    assert (done.failed, done.records, done.steps) == (None, 7, 1)
    assert peaks(tmp_path) == PEAKS


def test_a_claim_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    damage(recorded(tmp_path), 3)
    claim = tmp_path / "w/plugins/tb_memplugin/claimed"

    def failing(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("tb_memplugin.store.files.read_from", failing)
    done = CliRunner().invoke(command, [str(tmp_path), "--repair"])
    assert f"{tmp_path / 'w'} was not repaired: Input/output error ({claim})." in done.output


def test_the_command_says_what_it_did(tmp_path):
    path = recorded(tmp_path)
    damage(path, 3)
    asked = CliRunner().invoke(command, [str(tmp_path)])
    assert "--repair" in asked.output
    done = CliRunner().invoke(command, [str(tmp_path), "--repair"])
    assert "7 records and 1 step of side files were saved in new event files" in done.output
    assert f"the damaged files are now {tmp_path / 'w/plugins/tb_memplugin'}" in done.output
    assert "8 recorded steps of 1 worker" in done.output


def test_a_running_tensorboard_shows_what_was_saved_after_its_next_reload(tmp_path):
    damage(recorded(tmp_path / "run"), at=4)
    tab = Tab(tmp_path)
    shown = lambda: tab.get("runs")["runs"][0]["workers"][0]["steps"]["step"]  # noqa: E731
    assert shown() == [0, 1, 2]
    assert [(done.records, done.steps) for done in repair(str(tmp_path))] == [(7, 1)]
    tab.reload()
    assert shown() == list(range(8))
