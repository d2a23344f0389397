"""Files that grow: what they contain after each failure, and after someone else has changed them."""

from __future__ import annotations

import errno
import os
import uuid
from pathlib import Path

import fsspec
import pytest

from tb_memplugin.errors import MemPluginError
from tb_memplugin.store import files
from tb_memplugin.store.growing_file import GrowingFile, NotOursError, PartFiles, UnsettledError
from tb_memplugin.store.reader import load_window, read_recordings
from tb_memplugin.store.writer import RunWriter
from tests.faults.failing_files import FOREVER, FailingFiles, Fault
from tests.flushing import wait_for_the_disk
from tests.special_files import KINDS
from tests.traces import same, trace

WINDOWS = [trace(f"step {number}", f"alloc {100 + number} a") for number in range(4)]


@pytest.fixture
def failing(tmp_path, monkeypatch):
    failing = FailingFiles(str(tmp_path))
    failing.install(monkeypatch)
    return failing


def steps_in(path):
    return [step.metadata.step for step in read_recordings(str(path)).steps]


def operation(failing, wanted, action):
    """The number of the first operation of a name that an action performs."""
    with failing.failing(Fault("refused", at=-1)):
        action()
    return failing.operations.index(wanted) + 1


def test_a_file_begins_with_its_head_and_grows(tmp_path):
    file = GrowingFile(str(tmp_path / "a"), b"head ")
    for content in (b"one ", b"two "):
        file.append(content)
    assert (tmp_path / "a").read_bytes() == b"head one two "
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("kind", ["refused", "answer lost", "half written", "short"])
@pytest.mark.parametrize("wanted", ["open", "fstat", "write", "close"])
def test_one_failure_while_appending_is_not_noticed(tmp_path, failing, kind, wanted):
    file = GrowingFile(str(tmp_path / "a"), b"head ")
    file.append(b"one ")
    at = operation(failing, wanted, lambda: file.append(b"two "))
    with failing.failing(Fault(kind, errno.EIO, at)):
        file.append(b"three ")
    assert failing.hit
    assert file.pending == b""
    assert (tmp_path / "a").read_bytes() == b"head one two three "


def test_what_could_not_be_written_at_all_may_be_given_up(tmp_path, failing):
    file = GrowingFile(str(tmp_path / "a"), b"head ")
    file.append(b"one ")
    full = Fault("half written", errno.ENOSPC, operation(failing, "write", lambda: file.append(b"two ")))
    with failing.failing(full), pytest.MonkeyPatch.context() as patch:
        real = os.write
        patch.setattr(os, "write", lambda *given: real(*given) if not failing.hit else refuse())
        with pytest.raises(OSError, match="No space") as told:
            file.append(b"three ")
    assert not isinstance(told.value, UnsettledError)
    assert (tmp_path / "a").read_bytes() == b"head one two "
    file.append(b"four ")
    assert (tmp_path / "a").read_bytes() == b"head one two four "


def test_bytes_that_the_server_lost_when_the_file_was_closed_are_written_again(tmp_path, monkeypatch):
    """A network file system takes bytes, and says when the file is closed that it could not store them."""
    file = GrowingFile(str(tmp_path / "a"), b"head ")
    file.append(b"one ")
    left, close = [2], os.close

    def lose(descriptor):
        if left[0] and os.fstat(descriptor).st_size > 9:
            left[0] -= 1
            os.ftruncate(descriptor, 9)
            close(descriptor)
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        close(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", lose)
        with pytest.raises(OSError, match="quota") as told:
            file.append(b"two ")
    assert not isinstance(told.value, UnsettledError)
    assert (tmp_path / "a").read_bytes() == b"head one "
    left[0] = 1
    with monkeypatch.context() as patch:
        patch.setattr(os, "close", lose)
        file.append(b"three ")
    assert (tmp_path / "a").read_bytes() == b"head one three "


def refuse():
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("kind", ["refused", "answer lost", "half written"])
def test_what_may_have_been_written_is_completed_later_at_the_same_place(tmp_path, failing, kind):
    file = GrowingFile(str(tmp_path / "a"), b"head ")
    file.append(b"one ")
    at = operation(failing, "write", lambda: file.append(b"two "))
    with failing.failing(Fault(kind, errno.ESTALE, at, FOREVER)):
        with pytest.raises(UnsettledError):
            file.append(b"three ")
        for _ in range(2):
            with pytest.raises(OSError, match="Stale"):
                file.settle()
    begin = (tmp_path / "a").read_bytes()
    file.append(b"four ")
    assert (tmp_path / "a").read_bytes() == b"head one two three four "
    assert b"head one two three four ".startswith(begin)


def changed(how, path):
    whole = path.read_bytes()
    if how == "deleted":
        path.unlink()
    else:
        path.write_bytes(whole + b"of someone else" if how == "extended" else whole[:-1])


@pytest.mark.parametrize("how", ["deleted", "extended", "cut"])
def test_a_file_that_someone_else_changed_is_left_alone(tmp_path, how):
    file = GrowingFile(str(tmp_path / "a"), b"head ")
    file.append(b"one ")
    changed(how, tmp_path / "a")
    before = (tmp_path / "a").read_bytes() if how != "deleted" else None
    with pytest.raises(NotOursError):
        file.append(b"two ")
    assert before == ((tmp_path / "a").read_bytes() if before is not None else None)
    assert file.pending == b"two "


def test_a_file_that_was_there_before_is_left_alone(tmp_path):
    (tmp_path / "a").write_bytes(b"of someone else")
    with pytest.raises(NotOursError):
        GrowingFile(str(tmp_path / "a"), b"head ").append(b"one ")
    assert (tmp_path / "a").read_bytes() == b"of someone else"


@pytest.mark.parametrize("how", ["deleted", "extended", "cut"])
def test_a_writer_whose_event_file_was_changed_goes_on_in_another(tmp_path, how):
    writer = RunWriter(str(tmp_path), "rank0")
    first = Path(writer.write(WINDOWS[0]).event_file)
    changed(how, first)
    second = writer.write(WINDOWS[1])
    assert second.event_file.endswith(".000001.tb_memplugin")
    assert writer.write(WINDOWS[2]).event_file == second.event_file
    assert steps_in(tmp_path) == ([0, 1, 2] if how == "extended" else [1, 2])


def test_a_window_that_may_have_been_written_is_there_after_the_next_one(tmp_path, failing):
    writer = RunWriter(str(tmp_path), "rank0")
    writer.write(WINDOWS[0])
    operations = iter(range(1, 1000))
    writer.write(WINDOWS[1])
    for at in operations:
        with failing.failing(Fault("half written", errno.EIO, at, FOREVER, only="tfevents")):
            try:
                writer.write(WINDOWS[2])
            except MemPluginError:
                pass
            else:
                break
        if writer._claimed.current().is_unsettled:
            break
    assert steps_in(tmp_path) == [0, 1]
    unsettled = at + 1  # each window that failed before has a number of its own
    assert writer.write(WINDOWS[3]).window == unsettled + 1
    steps = read_recordings(str(tmp_path)).steps
    numbers = [(step.metadata.window, step.metadata.step) for step in steps]
    assert numbers == [(0, 0), (1, 1), (unsettled, 2), (unsettled + 1, 3)]
    assert all(
        same(load_window(str(step.side_file), step.metadata), window)
        for step, window in zip(steps, WINDOWS, strict=True)
    )


def test_a_claim_is_made_once_and_with_its_content(tmp_path):
    path = str(tmp_path / "claimed")
    assert files.claim(path, b"me")
    assert files.claim(path, b"me")  # again, after an error that was none
    assert not files.claim(path, b"you")
    assert not files.claim(path, b"m")
    assert (tmp_path / "claimed").read_bytes() == b"me"


@pytest.mark.parametrize("ask", [files.exists, files.names_in, files.folders_in, files.read_begin])
def test_an_error_is_no_answer_to_what_is_there(tmp_path, failing, ask):
    (tmp_path / "a").mkdir()
    with failing.failing(Fault("refused", errno.ESTALE, 1)), pytest.raises(OSError, match="Stale"):
        ask(str(tmp_path / "a"))
    if ask is files.read_begin:
        with pytest.raises(FileNotFoundError):
            ask(str(tmp_path / "absent"))
    else:
        assert not ask(str(tmp_path / "absent"))
        assert not ask(str(tmp_path / "a" / "absent" / "below"))


@pytest.fixture
def remote():
    url = f"memory://{uuid.uuid4().hex}"
    yield url
    fsspec.filesystem("memory").rm(url, recursive=True)


@pytest.mark.parametrize("is_done", [False, True], ids=["refused", "answer lost"])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "no answer"), ValueError("of the client")])
def test_a_remote_file_that_fails_is_there_once_or_not_at_all(remote, monkeypatch, is_done, error):
    parts = PartFiles(lambda number: f"{remote}/part{number}", b"head ")
    parts.append(b"one ")
    system = type(fsspec.filesystem("memory"))
    real = system.pipe_file

    def fail(self, path, value, **keywords):
        if is_done:
            real(self, path, value, **keywords)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(system, "pipe_file", fail)
        if is_done:
            parts.append(b"two ")
        else:
            with pytest.raises(OSError, match=r"no answer|of the client") as told:
                parts.append(b"two ")
            assert not isinstance(told.value, UnsettledError)
    parts.append(b"three ")
    assert contents(remote) == [b"head one ", *([b"head two "] if is_done else []), b"head three "]


def contents(url):
    system = fsspec.filesystem("memory")
    return [system.cat_file(path) for path in sorted(system.find(url))]


def test_a_remote_file_that_may_be_there_is_written_once(remote, monkeypatch):
    parts = PartFiles(lambda number: f"{remote}/part{number}", b"head ")
    system = type(fsspec.filesystem("memory"))

    def fail(*_, **__):
        raise OSError(errno.EIO, "no answer")

    parts.append(b"one ")
    with monkeypatch.context() as patch:
        patch.setattr(system, "info", fail)
        with pytest.raises(UnsettledError):
            parts.append(b"two ")
        with pytest.raises(OSError, match="no answer"):
            parts.append(b"three ")
    parts.append(b"four ")
    assert contents(remote) == [b"head one ", b"head two ", b"head four "]


def test_a_remote_file_of_someone_else_is_left_alone(remote):
    fsspec.filesystem("memory").pipe_file(f"{remote}/part0", b"of someone else")
    parts = PartFiles(lambda number: f"{remote}/part{number}", b"head ")
    parts.append(b"one ")
    assert parts.path == f"{remote}/part1"
    assert fsspec.filesystem("memory").cat_file(f"{remote}/part0") == b"of someone else"


@pytest.mark.parametrize("error", ["EPERM", "ENOSYS", "EOPNOTSUPP", "EINVAL"])
def test_without_hard_links_a_file_is_created_whole_and_replaces_none(tmp_path, monkeypatch, error):
    def no_links(*_):
        raise OSError(getattr(errno, error), "no hard links")

    monkeypatch.setattr(os, "link", no_links)
    (tmp_path / "old").write_bytes(b"old")
    files.write_new(str(tmp_path / "new"), lambda stream: stream.write(b"new"))
    with pytest.raises(FileExistsError):
        files.write_new(str(tmp_path / "old"), lambda stream: stream.write(b"new"))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"new": b"new", "old": b"old"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_claim_that_is_no_file_belongs_to_another_writer(tmp_path, caplog, kind):
    side = tmp_path / "rank0/plugins/tb_memplugin"
    side.mkdir(parents=True)
    KINDS[kind](side / "claimed")
    assert RunWriter(str(tmp_path), "rank0").write(WINDOWS[0]).worker == "rank0.2"
    wait_for_the_disk()
    (message,) = caplog.messages
    assert "so this one writes to" in message


@pytest.mark.parametrize("kind", KINDS)
def test_a_writer_whose_claim_became_something_else_goes_on_in_another_folder(tmp_path, caplog, kind):
    writer = RunWriter(str(tmp_path), "rank0")
    writer.write(WINDOWS[0])
    wait_for_the_disk()
    claim = tmp_path / "rank0/plugins/tb_memplugin/claimed"
    claim.unlink()
    KINDS[kind](claim)
    assert [writer.write(window).worker for window in WINDOWS[1:3]] == ["rank0.2", "rank0.2"]
    wait_for_the_disk()
    assert len(caplog.messages) == 1
    assert steps_in(tmp_path) == [0, 1, 2]


@pytest.mark.parametrize("kind", KINDS)
def test_a_writer_whose_event_file_became_something_else_goes_on_in_another(tmp_path, kind):
    writer = RunWriter(str(tmp_path), "rank0")
    path = Path(writer.write(WINDOWS[0]).event_file)
    wait_for_the_disk()
    path.unlink()
    KINDS[kind](path)
    parts = [writer.write(window).event_file for window in WINDOWS[1:3]]
    assert {part[-len(".000001.tb_memplugin") :] for part in parts} == {".000001.tb_memplugin"}
    assert steps_in(tmp_path) == [1, 2]


def test_a_folder_of_side_files_that_became_a_file_is_one_warning(tmp_path, caplog):
    writer = RunWriter(str(tmp_path), "rank0")
    writer.write(WINDOWS[0])
    wait_for_the_disk()
    (tmp_path / "rank0/plugins").rename(tmp_path / "away")
    (tmp_path / "rank0/plugins").write_bytes(b"")
    assert writer.write(WINDOWS[1]).worker == "rank0.2"
    wait_for_the_disk()
    (message,) = caplog.messages
    assert "so this one writes to" in message
