"""Runs all tests in two processes at the same time, each with about half of them: `python -m tests`.

Arguments are pytest's. Each line of output begins with the number of its process. pytest-xdist is not used:
its workers have a thread of their own, and a recorder sees whether a program has other threads.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence

FIRST = tuple(
    f"tests/{name}"
    for name in ("certificate", "faults", "browser", "server", "tensorboard", "callbacks", "commands")
)
"""What the first process runs; the second runs everything else."""


def main(arguments: Sequence[str]) -> int:
    """Run both processes and return the exit status of the first that failed, 0 if none did."""
    pytest = [sys.executable, "-m", "pytest", *arguments]
    commands = ([*pytest, *FIRST], [*pytest, *(f"--ignore={path}" for path in FIRST)])
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for command in commands
    ]
    threads = [
        threading.Thread(target=_print, args=(number, process))
        for number, process in enumerate(processes, start=1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return next(filter(None, [process.wait() for process in processes]), 0)


def _print(number: int, process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        sys.stdout.write(f"{number}| {line}")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
