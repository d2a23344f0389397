"""What waits for the disk waits for nothing else."""

from __future__ import annotations

import os
import threading

import pytest

from tb_memplugin.store.files import flush_path


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
