"""What waits for the disk waits for nothing else."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest

from tb_memplugin.errors import NoFileError
from tb_memplugin.store.files import (
    claim,
    discard,
    flush_path,
    left_below,
    open_ranges,
    read_begin,
    write_new,
)
from tests.special_files import KINDS


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
@pytest.mark.parametrize("kind", ["pipe", "device", "absent"])
def test_what_no_disk_has_is_not_waited_for(tmp_path, kind):
    path = {"pipe": tmp_path / "pipe", "device": "/dev/null", "absent": tmp_path / "absent"}[kind]
    if kind == "pipe":
        os.mkfifo(path)
    thread = threading.Thread(target=flush_path, args=(str(path),), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


def test_a_file_that_is_being_deleted_is_not_yet_one_that_could_not_be(tmp_path, monkeypatch):
    """The thread that flushes looks while another one deletes."""
    seen, unlink = [], os.unlink

    def deleting(path):
        seen.append(left_below(str(tmp_path)))
        unlink(path)

    path = tmp_path / "temporary"
    path.write_bytes(b"")
    monkeypatch.setattr(os, "unlink", deleting)
    discard(str(path))
    assert (seen, path.exists()) == ([[]], False)


def test_a_file_that_a_read_only_file_system_did_not_create_is_none_that_could_not_be_deleted(
    tmp_path, monkeypatch
):
    def refusing(*_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    (tmp_path / "there").write_bytes(b"")
    monkeypatch.setattr(os, "unlink", refusing)
    discard(str(tmp_path / "never"))
    assert left_below(str(tmp_path)) == []
    discard(str(tmp_path / "there"))
    assert [error.errno for error in left_below(str(tmp_path))] == [errno.EROFS]
    monkeypatch.undo()
    discard(str(tmp_path / "there"))
    assert left_below(str(tmp_path)) == []


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_refused_by_name_before_it_is_opened(tmp_path, monkeypatch, kind):
    path = tmp_path / "file"
    KINDS[kind](path)
    monkeypatch.setattr(os, "open", None)
    monkeypatch.setattr(Path, "open", None)
    with pytest.raises(NoFileError) as begin:
        read_begin(str(path))
    with pytest.raises(NoFileError) as whole, open_ranges(str(path)):
        pass
    reason = f"it is a {kind.removeprefix('link to a ')}, not a file"
    if kind in ("link to itself", "link to nothing"):
        reason = "it is a link that leads to no file"
    assert {(error.value.filename, error.value.strerror) for error in (begin, whole)} == {(str(path), reason)}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_nobodys_claim(tmp_path, kind):
    KINDS[kind](tmp_path / "claimed")
    assert claim(str(tmp_path / "claimed"), b"ours") is False


@pytest.mark.skipif(not os.access("/proc/kmsg", os.R_OK), reason="only root on Linux reads the kernel's log")
def test_a_file_without_a_size_that_waits_for_content_is_empty():
    with open_ranges("/proc/kmsg") as (read, size):
        assert (read(0, 1 << 16), size) == (b"", 0)
    assert read_begin("/proc/kmsg") == b""


def test_what_a_file_gets_after_it_was_opened_is_not_read(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    with open_ranges(str(path)) as (read, _):
        path.write_bytes(b"abcdef")
        assert [read(0, 9), read(1, 1), read(2, 9), read(5, 9)] == [b"abc", b"b", b"c", b""]


@pytest.mark.parametrize("number", [errno.EPERM, errno.EACCES, errno.EOPNOTSUPP])
def test_where_no_link_may_be_made_a_file_is_written_and_none_is_replaced(tmp_path, monkeypatch, number):
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", refuse)
    path = str(tmp_path / "file")
    write_new(path, lambda stream: stream.write(b"first"))
    with pytest.raises(FileExistsError):
        write_new(path, lambda stream: stream.write(b"second"))
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("file", b"first")]
