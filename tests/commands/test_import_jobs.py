"""`import --jobs`: many files at a time, by processes that crash, are killed and meet each other."""

from __future__ import annotations

import errno
import itertools
import json
import os
import pickle
import signal
import sys
from pathlib import Path

import pytest

from tb_memplugin.commands import import_, main
from tb_memplugin.commands.import_ import outcomes
from tb_memplugin.errors import MemPluginError
from tb_memplugin.store import files
from tests.commands.files import failing_snapshot, run, step_snapshot, told, write
from tests.commands.test_import import recorded

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
forked = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")

RANKS = 8


@pytest.fixture
def dumps(tmp_path):
    """One snapshot of each rank; rank r holds 300 + r bytes, and 90 more at its peak."""
    for rank in range(RANKS):
        write(tmp_path / "dumps" / f"rank{rank}.pickle", step_snapshot(300 + rank))
    return tmp_path / "dumps"


@pytest.fixture
def logdir(tmp_path):
    return tmp_path / "runs"


def job(logdir, pattern, *more):
    return ("import", pattern, "--logdir", logdir, "--run", "job", *more)


EXPECTED = [("job", f"rank{rank}", [390 + rank]) for rank in range(RANKS)]


@pytest.mark.parametrize("jobs", [1, 2, 20])
def test_a_pattern_in_quotes_is_all_of_its_files(dumps, logdir, jobs):
    imported = told(*job(logdir, dumps / "rank*.pickle", "--jobs", jobs))["imported"]
    assert sorted(item["worker"] for item in imported) == [worker for _, worker, _ in EXPECTED]
    assert recorded(logdir) == EXPECTED


def test_what_has_not_changed_is_not_imported_again(dumps, logdir):
    run(*job(logdir, dumps / "rank*.pickle"))
    before = {path: path.stat().st_mtime_ns for path in logdir.rglob("*")}
    write(dumps / "rank3.pickle", step_snapshot(700))
    again = told(*job(logdir, dumps / "rank*.pickle"))
    assert [(item["worker"], item["replaced"]) for item in again["imported"]] == [("rank3", True)]
    assert [item["worker"] for item in again["unchanged"]] == [f"rank{n}" for n in (0, 1, 2, 4, 5, 6, 7)]
    for path, changed in before.items():
        if path != logdir / "job" and "rank3" not in str(path):
            assert path.stat().st_mtime_ns == changed


def test_again_imports_what_has_not_changed(dumps, logdir):
    run(*job(logdir, dumps / "rank0.pickle"))
    (item,) = told(*job(logdir, dumps / "rank0.pickle", "--again"))["imported"]
    assert item["replaced"]
    assert recorded(logdir) == EXPECTED[:1]


def test_read_as_another_device_type_it_is_another_import(dumps, logdir):
    run(*job(logdir, dumps / "rank0.pickle"))
    (item,) = told(*job(logdir, dumps / "rank0.pickle", "--device-type", "xpu"))["imported"]
    assert item["devices"] == [{"device": "xpu:0", "peak_bytes": 390}]


def test_each_failure_is_one_line_at_the_end(dumps, logdir):
    (dumps / "rank2.pickle").write_bytes(b"\x80\x04]")
    (dumps / "rank5.pickle").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    (dumps / "rank6.pickle").unlink()
    (dumps / "rank6.pickle").symlink_to(dumps / "nowhere")
    result = run(*job(logdir, dumps / "rank*.pickle", "--jobs", 2))
    assert result.exit_code == 2
    lines = result.stderr.splitlines()
    assert sorted(line.partition(".pickle: ")[0] for line in lines[:3]) == [
        f"error: {dumps}/rank{rank}" for rank in (2, 5, 6)
    ]
    assert lines[3:] == ["3 of 8 files could not be imported."]
    assert recorded(logdir) == [EXPECTED[rank] for rank in (0, 1, 3, 4, 7)]


def test_a_note_of_many_files_is_printed_once(dumps, logdir):
    for rank in (1, 4, 5):
        write(dumps / f"rank{rank}.pickle", failing_snapshot())
    result = run(*job(logdir, dumps / "rank*.pickle"))
    (note,) = result.stderr.splitlines()
    assert note.startswith("note: rank1.pickle: cuda:0: out of memory at entry 1: 9,000 bytes requested")
    assert note.endswith(" (2 more files have such a note.)")


def test_files_of_one_name_are_workers_of_different_names(tmp_path, logdir):
    for rank in range(RANKS):
        write(tmp_path / f"rank{rank}" / "dump.pickle", step_snapshot(300 + rank))
    for _ in range(2):
        run(*job(logdir, tmp_path / "rank*" / "dump.pickle", "--jobs", 3))
        found = recorded(logdir)
        assert sorted(peak for _, _, (peak,) in found) == [390 + rank for rank in range(RANKS)]
        assert {worker for _, worker, _ in found} == {"dump", *(f"dump.{n}" for n in range(2, RANKS + 1))}


@forked
def test_two_imports_of_the_same_files_at_once_give_each_once(dumps, logdir):
    children = []
    for _ in range(2):
        child = os.fork()
        if child == 0:
            try:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                main([str(part) for part in job(logdir, dumps / "rank*", "--jobs", 2)], standalone_mode=False)
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    assert recorded(logdir) == EXPECTED
    folders = {path.name.partition(".v")[0] for path in (logdir / "job").iterdir()}
    assert folders == {worker for _, worker, _ in EXPECTED}
    assert len(list((logdir / "job").iterdir())) == RANKS


def crash(source):
    if source == "bad":
        os.kill(os.getpid(), signal.SIGKILL)
    if source == "worse":
        raise ZeroDivisionError
    return source.upper()


@forked
def test_a_source_that_ends_its_process_fails_alone():
    sources = ["a", "bad", "b", "worse", "c", "bad2", "d"]
    done = dict(filter(None, outcomes(sources, crash, 2)))
    errors = {source: done.pop(source) for source in ("bad", "worse")}
    assert done == {source: source.upper() for source in ("a", "b", "c", "bad2", "d")}
    assert errors["bad"].where == "bad"
    assert "signal 9" in errors["bad"].what
    assert "exit code 1" in errors["worse"].what


@forked
def test_files_that_need_more_than_a_share_of_the_memory_are_read_alone(monkeypatch):
    """Each process may have a half of 600 MB: a file that needs 400 MB is read when no other is."""
    monkeypatch.setattr("tb_memplugin.budget.free_bytes", lambda: 600_000_000)
    done = dict(filter(None, outcomes(["small", "large", "too large"], filled, 2)))
    assert (done["small"], done["large"]) == (1, 400_000_000)
    assert isinstance(done["too large"], MemPluginError)


def filled(source):
    from tb_memplugin import budget

    budget.open_file(source, 0)
    return len(bytearray({"small": 1, "large": 400_000_000, "too large": 800_000_000}[source]))


@forked
def test_an_interrupted_import_ends_its_processes_and_goes_on_later(dumps, logdir, monkeypatch):
    def interrupted(*_):
        yield "rank0", MemPluginError("It is bad.")
        raise KeyboardInterrupt

    monkeypatch.setattr(import_, "outcomes", interrupted)
    result = run(*job(logdir, dumps / "rank*.pickle"))
    assert result.exit_code == 1
    assert "Give the same command to go on." in result.stderr


def test_watched_files_are_imported_when_they_are_whole(dumps, logdir, monkeypatch):
    """A pickle grows from look to look; it is imported once, when two looks found the same."""
    content = pickle.dumps(step_snapshot(900))
    looks = iter([content[:50], content[:100], content, content, content])

    def wait(_seconds):
        try:
            (dumps / "rank8.pickle").write_bytes(part := next(looks))
            os.utime(dumps / "rank8.pickle", ns=(len(part), len(part)))
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr("tb_memplugin.commands.import_.time.sleep", wait)
    result = run(*job(logdir, dumps, "--watch", "--json"))
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["failed"] == []
    assert len(document["imported"]) == RANKS + 1
    assert recorded(logdir) == [*EXPECTED, ("job", "rank8", [990])]


def test_a_watched_file_that_stood_still_half_written_is_imported_later(dumps, logdir, monkeypatch):
    content = pickle.dumps(step_snapshot(900))
    looks = iter([content[:50], content[:50], content[:50], content, content, content])

    def wait(_seconds):
        part = next(looks, None)
        if part is None:
            raise KeyboardInterrupt
        (dumps / "rank8.pickle").write_bytes(part)
        os.utime(dumps / "rank8.pickle", ns=(len(part), len(part)))

    monkeypatch.setattr("tb_memplugin.commands.import_.time.sleep", wait)
    assert run(*job(logdir, dumps / "rank8*", dumps / "absent", "--watch")).exit_code == 0
    assert recorded(logdir) == [("job", "rank8", [990])]


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
@pytest.mark.parametrize("interrupt", ["killpg", "kill"])
def test_a_real_interrupt_leaves_no_process(dumps, logdir, interrupt):
    import subprocess
    import time

    program = [sys.executable, "-m", "tb_memplugin", *map(str, job(logdir, dumps, "--watch", "--jobs", 2))]
    with subprocess.Popen(
        program,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background ignores it
    ) as started:
        deadline = time.monotonic() + 60
        while len(list(Path(logdir).glob("job/*/events*"))) < RANKS and time.monotonic() < deadline:
            time.sleep(0.1)
        getattr(os, interrupt)(started.pid, signal.SIGINT)  # of a terminal, of a supervisor
        _, errors = started.communicate(timeout=30)
    assert started.returncode == 0, errors
    assert "Traceback" not in errors
    with pytest.raises(ProcessLookupError):
        os.killpg(started.pid, 0)
    assert recorded(logdir) == EXPECTED


@pytest.mark.parametrize("broken", ["logdir", "read"])
def test_a_watched_file_is_imported_when_the_file_system_works_again(dumps, logdir, monkeypatch, broken):
    works, open_ranges = dumps.parent / "works", files.open_ranges

    def opened(path):
        if str(path).endswith(".pickle") and not works.exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return open_ranges(path)

    def wait(_seconds):
        if next(looks) == 3:
            works.touch()
            logdir.unlink(missing_ok=True)

    if broken == "logdir":
        logdir.touch()  # no folder can be made there
    else:
        monkeypatch.setattr(files, "open_ranges", opened)
    looks = interrupted_after(5)
    monkeypatch.setattr("tb_memplugin.commands.import_.time.sleep", wait)
    result = run(*job(logdir, dumps, "--watch", "--json"))
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["failed"] == []
    assert recorded(logdir) == EXPECTED


def test_a_damaged_watched_file_is_read_once(dumps, logdir, monkeypatch):
    (dumps / "rank8.pickle").write_bytes(b"damaged")
    opened, open_ranges, looks = dumps.parent / "opened", files.open_ranges, interrupted_after(5)

    def noted(path):
        with opened.open("a") as stream:
            stream.write(f"{path}\n")
        return open_ranges(path)

    monkeypatch.setattr(files, "open_ranges", noted)
    monkeypatch.setattr("tb_memplugin.commands.import_.time.sleep", lambda _: next(looks))
    assert run(*job(logdir, dumps, "--watch")).exit_code == 2
    assert opened.read_text().count("rank8.pickle") == 1
    assert recorded(logdir) == EXPECTED


def test_watching_goes_on_while_a_remote_folder_cannot_be_listed(logdir, monkeypatch):
    import fsspec

    store, looks = fsspec.filesystem("memory"), interrupted_after(6)
    store.pipe("/watched/rank0.pickle", pickle.dumps(step_snapshot(300)))
    glob = type(store).glob

    def listed(self, *arguments, **options):
        if next(listings) in (2, 3, 5):
            raise OSError(errno.EIO, "refused")
        return glob(self, *arguments, **options)

    listings = itertools.count(1)
    monkeypatch.setattr(type(store), "glob", listed)
    monkeypatch.setattr("tb_memplugin.commands.import_.time.sleep", lambda _: next(looks))
    result = run(*job(logdir, "memory://watched", "--watch"))
    store.rm("/watched", recursive=True)
    assert result.exit_code == 0, result.output
    assert result.stderr.count("refused") == 2  # each time that it begins
    assert recorded(logdir) == EXPECTED[:1]


def interrupted_after(count):
    """Yield numbers from 1, then raise what Ctrl-C does."""
    yield from range(1, count + 1)
    raise KeyboardInterrupt
