"""Ends what a test run has started, also if the run is killed: servers, browsers, and their own children.

Every process that is started below a test run inherits a mark in its environment. A watcher, which runs
beside the test run, waits for its end, and then kills the processes that carry the mark. So no test has to
start its processes in another way. What is forked without starting a program does not carry the mark.

Linux only: elsewhere nothing is watched.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import uuid
from contextlib import suppress
from pathlib import Path

MARKS = "TB_MEMPLUGIN_TEST_RUNS"
"""The environment variable with the marks of this test run and of those that started it."""

ROUNDS = 5
"""How often the watcher looks: a process may be starting another one while it is killed."""


def end_with_this_process() -> None:
    """Mark what this process starts from now on, and start its watcher."""
    if not sys.platform.startswith("linux"):
        return
    mark = uuid.uuid4().hex
    unmarked = {name: value for name, value in os.environ.items() if name != MARKS}
    os.environ[MARKS] = f"{os.environ.get(MARKS, '')} {mark}"
    subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, str(os.getpid()), mark],
        env=unmarked,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # so that Ctrl-C does not reach it
    )


def watch(process: int, mark: str) -> None:
    """Wait until a process has ended, then kill all that carry the mark."""
    with suppress(ProcessLookupError):
        select.select([os.pidfd_open(process)], [], [])
    for _ in range(ROUNDS):
        if not sum(_killed(int(folder.name), mark.encode()) for folder in Path("/proc").glob("[0-9]*")):
            return
        select.select([], [], [], 0.1)


def _killed(process: int, mark: bytes) -> bool:
    """Kill a process if it carries the mark; a file descriptor of it keeps another from taking its id."""
    with suppress(OSError):
        descriptor = os.pidfd_open(process)
        try:
            if mark in Path(f"/proc/{process}/environ").read_bytes():
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                return True
        finally:
            os.close(descriptor)
    return False


if __name__ == "__main__":
    watch(int(sys.argv[1]), sys.argv[2])
