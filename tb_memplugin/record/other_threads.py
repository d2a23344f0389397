"""The program's other Python threads, without ours that flushes files: it runs nothing of torch."""

from __future__ import annotations

import sys
import threading
from types import FrameType

from tb_memplugin.store.disk_sync import THREAD


def frames_of_other_threads() -> list[FrameType]:
    """Return the innermost frame of each Python thread but the calling one."""
    ours = {thread.ident for thread in threading.enumerate() if thread.name == THREAD}
    ours.add(threading.get_ident())
    return [frame for ident, frame in sys._current_frames().items() if ident not in ours]
