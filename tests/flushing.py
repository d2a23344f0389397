"""The thread that flushes recordings to the disk, which ends by itself."""

from __future__ import annotations

import threading
import time

from tb_memplugin.store import disk_sync


def wait_for_the_disk() -> None:
    """Wait until that thread has ended, if there is one, also one that has not begun yet."""
    until = time.monotonic() + disk_sync.LONGEST_WAIT_SECONDS
    while any(thread.name == disk_sync.THREAD for thread in threading.enumerate()):
        if time.monotonic() > until:
            return
        time.sleep(0.001)
