"""What waits for the disk waits for nothing else."""

from __future__ import annotations

import os
import threading

import pytest

from tb_memplugin.store.files import discard, flush_path, left_below


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
