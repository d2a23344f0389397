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

from tb_memplugin.commands import main as main_command
from tb_memplugin.exports.formats import write_as
from tb_memplugin.store.imports import write_import
from tb_memplugin.store.paths import CLAIM, SIDE_FOLDER
from tb_memplugin.store.reader import read_recordings
from tests.commands.files import step_snapshot, told, write
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
    """Run a program in a process, and kill it and those that it started.

    Return what it told, and whether it was still running.
    """
    told, tell = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.setpgid(0, 0)
            silent = os.open(os.devnull, os.O_WRONLY)
            for output in (1, 2):
                os.dup2(silent, output)
            child(lambda number: os.write(tell, bytes([number])))
        finally:
            os._exit(0)
    os.close(tell)
    time.sleep(seconds)
    with suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    with os.fdopen(told, "rb") as stream:
        written = set(stream.read())
    was_running = os.WIFSIGNALED(os.waitpid(process, 0)[1])
    with suppress(ProcessLookupError):
        while True:  # until those that it started have ended, too
            os.killpg(process, 0)
            time.sleep(0.01)
    return written, was_running


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


FILES = 6


def kill_import_of_files(seconds: float) -> bool:
    """Kill an import of several files by two jobs after some time. Return whether it was still running.

    Raises:
        AssertionError: something is lost, is there twice, or was imported again.
    """
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(FILES):
            write(Path(folder, f"rank{rank}.pickle"), step_snapshot(300 + rank))
        sources = ["import", f"{folder}/rank*.pickle", "--logdir", f"{folder}/logdir", "--run", "job"]
        command = [*sources, "--jobs", "2"]
        _, was_running = killed(lambda _: main_command(command, standalone_mode=False), seconds)
        before = claims_of(f"{folder}/logdir")
        again = told(*command)
        assert {each["worker"] for each in again["unchanged"]} == before.keys()
        assert len(again["imported"]) == FILES - len(before)
        after = claims_of(f"{folder}/logdir")
        assert before.items() <= after.items()
        assert after.keys() == {f"rank{rank}" for rank in range(FILES)}
        assert len(list(Path(folder, "logdir/job").iterdir())) == FILES
        assert list(Path(folder).rglob("*.tmp")) == []
    return was_running


def claims_of(logdir: str) -> dict[str, bytes]:
    """Return the claim of each worker in the run `job`, whose import is complete and right."""
    claims = {}
    for step in read_recordings(logdir).steps if Path(logdir).exists() else ():
        worker, (device,) = step.metadata.worker, step.metadata.devices
        assert worker not in claims
        assert device.stats.peak_bytes == 390 + int(worker.removeprefix("rank"))
        claims[worker] = Path(step.folder, SIDE_FOLDER, CLAIM).read_bytes()
    return claims


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
    "import --jobs 2": kill_import_of_files,
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
