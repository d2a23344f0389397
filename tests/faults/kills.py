"""Kill writers at random moments, and look for what was lost: `python -m tests.faults.kills 500`.

Each writer runs in a process of its own that tells what it has written. A signal ends it after a random time:
between two operations, or within one. What it had told must be readable, and the next writer must go on.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from tb_memplugin.exports.formats import write_as
from tb_memplugin.store.imports import write_import
from tests.faults.test_faults import (
    NEW,
    NEW_STEPS,
    OLD,
    OLD_STEPS,
    ORIGIN,
    RECORDERS,
    Program,
    Recorder,
    imported,
)
from tests.traces import trace

Child = Callable[[Callable[[int], object]], object]
"""A program that calls its argument with each number that it has written."""


def killed(child: Child, seconds: float) -> tuple[set[int], bool]:
    """Run a program in a process, and kill it. Return what it told, and whether it was still running."""
    told, tell = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            silent = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silent, 2)
            child(lambda number: os.write(tell, bytes([number])))
        finally:
            os._exit(0)
    os.close(tell)
    time.sleep(seconds)
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
    with os.fdopen(told, "rb") as stream:
        written = set(stream.read())
    return written, os.WIFSIGNALED(os.waitpid(process, 0)[1])


def kill_recorder(recorder: Recorder, seconds: float) -> bool:
    """Kill a recorder after some time. Return whether it was still running.

    Raises:
        AssertionError: something is lost, or wrong.
    """
    with tempfile.TemporaryDirectory() as folder:
        logdir = f"{folder}/logdir"

        def record(tell: Callable[[int], object]) -> None:
            recorder.run(Program(logdir, lambda steps: [tell(step) for step in steps]))

        written, was_running = killed(record, seconds)
        before = recorder.read(logdir).get("rank0", {})
        assert before.items() <= recorder.peaks.items()
        assert written <= before.keys(), written - before.keys()
        recorder.run(Program(logdir, lambda _: None))
        after = recorder.read(logdir)
        assert recorder.peaks in after.values()
        assert before.items() <= after.get("rank0", {}).items()
    return was_running


def kill_import(seconds: float) -> bool:
    """Kill a repeated import after some time. Return whether it was still running.

    Raises:
        AssertionError: the old and the new one are lost, or something is wrong.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_import(folder, "w", ORIGIN, OLD)
        written, was_running = killed(
            lambda tell: tell(write_import(folder, "w", ORIGIN, NEW).written.steps[0]), seconds
        )
        assert imported(folder) in ([NEW_STEPS] if written else [OLD_STEPS, NEW_STEPS])
        assert write_import(folder, "w", ORIGIN, NEW).written.worker == "w"
        assert imported(folder) == NEW_STEPS
        assert list(Path(folder).rglob("*.tmp")) == []
    return was_running


ROWS = 2_000


def csv_of(path: Path, size: int) -> bytes:
    """Export allocations of a size, whose file is long enough to be killed within, and return the file."""
    write_as("csv", trace("step 0", *(f"alloc {size} {row}" for row in range(ROWS))), path, "")
    return path.read_bytes()


def kill_export(seconds: float) -> bool:
    """Kill an export that replaces an earlier one after some time. Return whether it was still running.

    Raises:
        AssertionError: neither the old file nor the new one is there, or something else is left.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.csv")
        new, old = csv_of(path, 8), csv_of(path, 7)
        written, was_running = killed(lambda tell: tell(len(csv_of(path, 8)) > 0), seconds)
        assert path.read_bytes() in ([new] if written else [old, new])
        assert csv_of(path, 8) == new
        assert list(Path(folder).iterdir()) == [path]
    return was_running


WRITERS: dict[str, Callable[[float], bool]] = {
    "handler": partial(kill_recorder, RECORDERS["handler"]),
    "monitor": partial(kill_recorder, RECORDERS["monitor"]),
    "import": kill_import,
    "export": kill_export,
}


def kill(name: str, times: int, seed: int) -> list[str]:
    """Kill a writer at random moments, so many times while it was still running. Return what was wrong."""
    chance, most, hits, problems = random.Random(seed), 0.05, 0, list[str]()
    while hits + len(problems) < times:
        seconds = chance.random() * most
        try:
            was_running = WRITERS[name](seconds)
        except AssertionError as error:
            problems.append(f"{name} after {seconds:.4f} s: {error}")
            continue
        hits += was_running
        most = most * 1.1 if was_running else max(most / 1.1, 0.01)  # about half of them are in time
    return problems


def main(times: int) -> int:
    """Print how many processes were killed, and what is lost. Return 1 if anything."""
    failed = 0
    logging.disable()
    os.environ["RANK"] = "1"  # rank 0 tells where recordings are
    for name in WRITERS:
        begin = time.monotonic()
        problems = kill(name, times, seed=times)
        failed += len(problems)
        seconds = time.monotonic() - begin
        counts = f"{times} processes killed while they ran, {len(problems)} with a loss"
        sys.stdout.write(f"{name}: {counts} ({seconds:.0f} s)\n")
        sys.stdout.writelines(f"    {line}\n" for line in problems)
        sys.stdout.flush()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
