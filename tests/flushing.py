"""The thread that flushes recordings to the disk, which ends by itself."""

from __future__ import annotations

import threading

from tb_memplugin.store import disk_sync


def wait_for_the_disk() -> None:
    """Wait until that thread has ended, if there is one."""
    for thread in threading.enumerate():
        if thread.name == disk_sync.THREAD:
            thread.join(disk_sync.LONGEST_WAIT_SECONDS)
