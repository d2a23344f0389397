"""Whatever a disk kept of the last seconds before the machine lost its power: what is shown is true.

`python -m tests.faults.test_power_loss 400` leaves more to chance after each operation than the tests do.
"""

from __future__ import annotations

import logging
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import tb_memplugin.store.writer
from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.store import disk_sync
from tb_memplugin.store.imports import write_import
from tb_memplugin.store.reader import load_window, read_recordings
from tests.faults.power_loss import RecordedDisk
from tests.faults.test_faults import (
    NEW,
    NEW_STEPS,
    OLD,
    OLD_STEPS,
    ORIGIN,
    RECORDERS,
    WINDOWS,
    Peaks,
    Program,
    Recorder,
    is_window,
)
from tests.traces import same

BY_CHANCE = 3
"""After each operation, the number of disks in which chance decides."""

NEXT_PROCESS = 40
"""One in so many of these disks is also written to by the next process."""

SENTENCES = {
    "The side file with this window's events is missing.",
    "The file is empty: the machine stopped before its content was on the disk.",
    "The file begins with zeros only: the machine stopped before its content was on the disk.",
    "The file has no end: it is truncated.",
    "A checksum in the file is wrong: it is damaged.",
    "The checksum of the file's index is wrong: it is damaged.",
    "The event file is empty.",
    "The event file ends unexpectedly",
    "The event file is damaged",
}
"""What users are told of files of which the disk has a part."""


@contextmanager
def recorded_disk(root: Path) -> Iterator[RecordedDisk]:
    """A disk whose operations are recorded. Files are flushed as soon as they are added."""
    disk = RecordedDisk(str(root))
    root.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_sync, "in_background", lambda run: run())
        patch.setattr(tb_memplugin.store.writer, "FLUSH_SECONDS", 0.0)
        disk.install(patch)
        yield disk


def shown(logdir: str) -> tuple[Peaks, list[str]]:
    """The peaks of all steps in a folder, and what is said of the files that cannot be read."""
    if not Path(logdir).exists():
        return {}, []
    recordings, peaks = read_recordings(logdir), Peaks()
    problems = [error.what for error in recordings.problems]
    for step in recordings.steps:
        number = step.metadata.step
        peaks.setdefault(step.metadata.worker, {})[number] = step.summary().devices[0].stats.peak_bytes
        assert step.side_file is not None
        try:
            assert same(load_window(step.side_file, step.metadata), WINDOWS[number // 2])
        except UnreadableFileError as error:
            problems.append(error.what)
    for watched in recordings.watched:
        assert watched.figures.notes == ()
        values = watched.figures.devices[0].peak.tolist()
        peaks[watched.worker] = dict(zip(watched.figures.steps.tolist(), values, strict=True))
    return peaks, problems


def check_recorder(recorder: Recorder, folder: Path, chance: random.Random, others: int) -> Counter[str]:
    """Run a recorder, and look at each disk that a crash may leave. Return how many, and what was told."""
    with recorded_disk(folder / "disk") as disk:
        logdir = f"{disk.root}/logdir"
        safe: dict[int, int] = {}

        def kept(_: object) -> None:
            disk.mark(dict(recorder.read(logdir)["rank0"]))

        recorder.run(Program(logdir, kept))
    counts: Counter[str] = Counter()
    seen: set[tuple[int, int]] = set()
    for until in range(len(disk.operations) + 1):
        safe = next((mark for row, mark in reversed(disk.marks) if row <= until), {})
        for state in disk.states(until, chance, others):
            if (len(safe), state.key) in seen:
                continue
            seen.add((len(safe), state.key))
            counts["disks"] += 1
            copy = folder / "copy"
            shutil.rmtree(copy, ignore_errors=True)
            state.write_to(copy)
            peaks, problems = shown(f"{copy}/logdir")
            steps = peaks.get("rank0", {})
            assert peaks.keys() <= {"rank0"}
            assert steps.items() <= recorder.peaks.items(), until
            assert safe.items() <= steps.items(), (until, safe.keys() - steps.keys())
            for what in problems:
                counts[what.partition(" at byte")[0]] += 1
            if counts["disks"] % NEXT_PROCESS == 0:
                recorder.run(Program(f"{copy}/logdir", lambda _: None))
                after = recorder.read(f"{copy}/logdir") if not problems else shown(f"{copy}/logdir")[0]
                assert recorder.peaks in after.values()
                assert steps.items() <= after.get("rank0", {}).items()
    return counts


@pytest.mark.parametrize("name", RECORDERS)
def test_after_a_crash_of_the_machine_all_that_was_flushed_is_there_and_all_that_is_there_is_true(
    tmp_path, name
):
    counts = check_recorder(RECORDERS[name], tmp_path, random.Random(0), BY_CHANCE)
    assert counts.pop("disks") > 100
    assert counts.keys() <= SENTENCES


def check_import(folder: Path, chance: random.Random, others: int) -> Counter[str]:
    """Import a file again, and look at each disk that a crash may leave."""
    with recorded_disk(folder / "disk") as disk:
        logdir = f"{disk.root}/logdir"
        write_import(logdir, "w", ORIGIN, OLD)
        disk.mark("old")
        write_import(logdir, "w", ORIGIN, NEW)
        disk.mark("new")
    (begin, _), (end, _) = disk.marks
    counts: Counter[str] = Counter()
    seen: set[int] = set()
    for until in range(begin, len(disk.operations) + 1):
        for state in disk.states(until, chance, others):
            if state.key in seen:
                continue
            seen.add(state.key)
            counts["disks"] += 1
            copy = folder / "copy"
            shutil.rmtree(copy, ignore_errors=True)
            state.write_to(copy)
            logdir = f"{copy}/logdir"
            assert complete(logdir) in ([NEW_STEPS] if until >= end else [OLD_STEPS, NEW_STEPS]), until
            if counts["disks"] % NEXT_PROCESS == 0:
                assert write_import(logdir, "w", ORIGIN, NEW).written.worker == "w"
                assert complete(logdir) == NEW_STEPS
    return counts


def complete(logdir: str) -> list[tuple[str, int]]:
    """The worker and the number of each step, whose side files are right."""
    found = []
    for step in read_recordings(logdir).steps:
        assert step.side_file is not None
        assert is_window(Path(step.side_file).read_bytes(), step.metadata.step // 2)
        found.append((step.metadata.worker, step.metadata.step))
    return found


def test_after_a_crash_during_an_import_the_old_one_or_the_new_one_is_there_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("tb_memplugin.store.imports.FILL_SECONDS", 0.0)
    counts = check_import(tmp_path, random.Random(0), BY_CHANCE)
    assert counts["disks"] > 30


def main(others: int) -> None:
    """Print how many disks were looked at, and how often which file could not be read."""
    logging.disable()
    for name in (*RECORDERS, "import"):
        with tempfile.TemporaryDirectory() as folder:
            chance = random.Random(others)
            counts = (
                check_import(Path(folder), chance, others)
                if name == "import"
                else check_recorder(RECORDERS[name], Path(folder), chance, others)
            )
        sys.stdout.write(f"{name}: {counts.pop('disks'):,} disks, nothing lost that was flushed\n")
        sys.stdout.writelines(f"    {count:,} times: {what}\n" for what, count in counts.most_common())


if __name__ == "__main__":
    main(int(sys.argv[1]))
