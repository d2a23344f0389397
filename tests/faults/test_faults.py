"""Whatever a file system does to a writer: what was written stays, and the writer goes on."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

import tb_memplugin.record.monitor
from tb_memplugin import MemoryMonitor, MemPluginError
from tb_memplugin.errors import UnflushedError
from tb_memplugin.record.guard import Guard
from tb_memplugin.record.steps.counters import AllocatorCounters, SharedPeaks
from tb_memplugin.store.disk_sync import DiskSync, refusal
from tb_memplugin.store.imports import imported_as, write_import
from tb_memplugin.store.reader import Recordings, read_recordings
from tb_memplugin.store.windows import read_window
from tb_memplugin.store.writer import RunWriter
from tests.counting_allocator import CountingAllocator, Handle
from tests.faults.failing_files import FOREVER, KILLED, FailingFiles, Fault, Kind
from tests.traces import same, trace

ERRORS = ("ENOSPC", "EACCES", "EIO", "EROFS", "EMFILE", "ESTALE", "EDQUOT")
ONCE: tuple[tuple[Kind, str], ...] = (
    *(("refused", name) for name in ERRORS),
    ("answer lost", "EIO"),
    ("half written", "ENOSPC"),
    ("short", "EIO"),
)
LASTING: tuple[tuple[Kind, str], ...] = (
    *(("refused", name) for name in ERRORS),
    ("answer lost", "ESTALE"),
    ("half written", "EDQUOT"),
)
KILLS: tuple[Kind, ...] = ("killed before", "killed after", "killed half")

WINDOWS = [
    trace(f"step {2 * number}", f"alloc {100 + number} a", "free a", f"step {2 * number + 1}", "alloc 7 b")
    for number in range(3)
]
PEAKS = {step: 100 + step // 2 if step % 2 == 0 else 7 for step in range(6)}
"""The peak of each step of `WINDOWS`, in bytes."""

STEPS, EACH = 8, 2
MONITORED = {step: 100 + step for step in range(STEPS)}
"""The number of steps that the monitor sees, and how many of them it writes at once."""

ONE_WRITE = 30
"""More operations than one write of any recorder needs."""

ORIGIN = "/a/w.pickle"
OLD, NEW = WINDOWS[:2]
OLD_STEPS, NEW_STEPS = [("w", 0), ("w", 1)], [("w", 2), ("w", 3)]


@dataclass
class Program:
    """A program that writes below a folder.

    Attributes:
        warnings: the messages that its user sees.
        after_write: called after each write, with the steps that were written if the program knows.
    """

    logdir: str
    after_write: Callable[[Sequence[int]], object]
    warnings: list[str] = field(default_factory=list)


def record_windows(program: Program) -> None:
    """A handler's windows. As in the handler, a guard logs errors."""
    logger, messages = logging.Logger("handler"), Messages()
    messages.warnings = program.warnings
    logger.addHandler(messages)
    guard = Guard("", logger)
    writer = RunWriter(program.logdir, "rank0", lambda error: guard.end("the disk", error))
    for window in WINDOWS:
        try:
            written = writer.write(window)
        except MemPluginError as error:
            guard.end("a window", error)
            program.after_write(())
        else:
            program.after_write(written.steps)


def monitor_steps(program: Program) -> None:
    """A monitor's steps: step n has a peak of 100 + n bytes."""
    allocator = CountingAllocator()
    peaks = SharedPeaks(allocator.doors)
    with pytest.MonkeyPatch.context() as patch:
        counters = lambda *_, **__: [AllocatorCounters(Handle(), lambda: peaks)]  # noqa: E731
        patch.setattr(tb_memplugin.record.monitor, "counters_of", counters)
        monitor = MemoryMonitor(program.logdir, "rank0", flush_seconds=600)
        for number in range(STEPS):
            allocator.briefly(100 + number)
            monitor.step()
            if number % EACH == EACH - 1:
                monitor.flush()
                program.after_write(() if monitor._guard._logged else range(number + 1))
        monitor.close()


Peaks = dict[str, dict[int, int]]
"""The peak of each step that can be read, by worker and step."""


@cache
def is_window(content: bytes, row: int) -> bool:
    """Whether the content of a side file is that of a row of `WINDOWS`."""
    read = lambda offset, size: content[offset : offset + size]  # noqa: E731
    return same(read_window(read, len(content), "side file"), WINDOWS[row])


def windows_in(logdir: str) -> Peaks:
    """The peaks in the summaries of a handler's steps, whose side files are right."""
    recordings = read_recordings(logdir) if Path(logdir).exists() else Recordings()
    found: Peaks = {}
    for step in recordings.steps:
        peaks, number = found.setdefault(step.metadata.worker, {}), step.metadata.step
        assert number not in peaks
        assert step.side_file is not None
        assert is_window(Path(step.side_file).read_bytes(), number // 2)
        peaks[number] = step.summary().devices[0].stats.peak_bytes
    return found


def monitored_in(logdir: str) -> Peaks:
    """The peaks of a monitor's steps."""
    recordings = read_recordings(logdir) if Path(logdir).exists() else Recordings()
    found: Peaks = {}
    for watched in recordings.watched:
        assert watched.figures.notes == ()  # nothing was written twice
        peaks = watched.figures.devices[0].peak.tolist()
        found[watched.worker] = dict(zip(watched.figures.steps.tolist(), peaks, strict=True))
    return found


@dataclass(frozen=True)
class Recorder:
    """A recording program, how to read what it wrote, and the true peaks."""

    run: Callable[[Program], None]
    read: Callable[[str], Peaks]
    peaks: dict[int, int]
    most_missing: int
    folder: str


RECORDERS = {
    "handler": Recorder(record_windows, windows_in, PEAKS, 2, "rank0"),
    "monitor": Recorder(monitor_steps, monitored_in, MONITORED, 0, "rank0.steps"),
}


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FailingFiles:
    failing = FailingFiles(str(tmp_path / "logdir"))
    failing.install(monkeypatch)
    return failing


@dataclass(frozen=True)
class Case:
    """A run of a recorder with a fault, of which nothing was lost while it ran: what its user was told."""

    fault: Fault
    operation: str
    warnings: list[str]


def each_case(
    recorder: Recorder,
    files: FailingFiles,
    kind: Kind,
    error: str,
    *,
    lasts: int = 0,
    only: str = "",
    operation: str = "",
) -> Iterator[Case]:
    """Run a recorder anew for each of its operations, with a fault there.

    What was written, or could be read once, must be readable after every write, and true.
    """
    log = logging.getLogger("tb_memplugin")
    at = 0
    while True:
        at += 1
        shutil.rmtree(files.root, ignore_errors=True)
        safe: set[int] = set()

        def check(written: Sequence[int], safe: set[int] = safe) -> None:
            if files.hit:
                with files.whole():
                    found = recorder.read(files.root)
                assert found.keys() <= {"rank0"}
                steps = found.get("rank0", {})
                assert steps.items() <= recorder.peaks.items()
                assert safe | set(written) <= steps.keys()
                safe |= steps.keys()
            else:
                safe |= set(written)

        fault, messages = Fault(kind, getattr(errno, error), at, lasts, only, operation), Messages()
        log.addHandler(messages)
        with files.failing(fault):
            program = Program(files.root, check)
            recorder.run(program)
            check(())
        log.removeHandler(messages)
        if not files.hit:
            assert at > (5 if only or operation else 30)
            return
        yield Case(fault, files.operations[at - 1], program.warnings + messages.warnings)


class Messages(logging.Handler):
    """Collects the texts of warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.warnings: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.warnings.append(record.getMessage())


@pytest.mark.parametrize("name", RECORDERS)
@pytest.mark.parametrize(("kind", "error"), ONCE)
def test_a_fault_that_happens_once_costs_one_window_at_the_most(files, name, kind, error):
    recorder = RECORDERS[name]
    for case in each_case(recorder, files, kind, error):
        missing = recorder.peaks.keys() - recorder.read(files.root)["rank0"].keys()
        assert len(missing) <= recorder.most_missing, case
        assert len(case.warnings) <= 1, case
        assert case.warnings or not missing, case
        assert [path.name for path in Path(files.root).iterdir()] == [recorder.folder], case
        assert read_recordings(files.root).problems == (), case


@pytest.mark.parametrize("name", RECORDERS)
@pytest.mark.parametrize("lasts", [2, 3, 5])
@pytest.mark.parametrize("kind", ["refused", "answer lost", "half written"])
def test_after_a_fault_that_lasts_a_while_recording_goes_on(files, name, kind, lasts):
    recorder = RECORDERS[name]
    for case in each_case(recorder, files, kind, "ESTALE", lasts=lasts):
        missing = recorder.peaks.keys() - recorder.read(files.root).get("rank0", {}).keys()
        assert len(case.warnings) <= 1, case
        assert case.warnings or not missing, case
        if len(files.operations) > case.fault.at + lasts + ONE_WRITE:  # it ended before the last write began
            assert len(missing) <= recorder.most_missing * (1 + lasts), case
            assert [path.name for path in Path(files.root).iterdir()] == [recorder.folder], case
            assert read_recordings(files.root).problems == (), case


@pytest.mark.parametrize("name", RECORDERS)
@pytest.mark.parametrize(
    ("kind", "error", "only"),
    [*((*case, "") for case in LASTING), *((*case, "tfevents") for case in (LASTING[2], LASTING[-1]))],
)
def test_a_fault_that_lasts_leaves_everything_before_it(files, name, kind, error, only):
    recorder = RECORDERS[name]
    for case in each_case(recorder, files, kind, error, lasts=FOREVER, only=only):
        assert len(case.warnings) <= 1, case
        assert case.warnings or recorder.read(files.root) == {"rank0": recorder.peaks}, case
        problems = read_recordings(files.root).problems if Path(files.root).exists() else ()
        assert problems == () or kind == "half written", case


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", RECORDERS)
@pytest.mark.parametrize("kind", KILLS)
def test_a_process_that_is_killed_leaves_what_it_wrote_and_the_next_one_goes_on(files, name, kind):
    recorder = RECORDERS[name]
    at, status = 0, KILLED
    while status == KILLED:
        at += 1
        shutil.rmtree(files.root, ignore_errors=True)
        written, status = run_killed(recorder, files, Fault(kind, at=at))
        before = recorder.read(files.root)
        assert before.get("rank0", {}).items() <= recorder.peaks.items(), at
        assert written <= before.get("rank0", {}).keys(), at
        recorder.run(Program(files.root, lambda _: None))
        after = recorder.read(files.root)
        assert after in ({**before, "rank0.2": recorder.peaks}, {"rank0": recorder.peaks}), at
    assert status == 0
    assert at > 30


def run_killed(recorder: Recorder, files: FailingFiles, fault: Fault) -> tuple[set[int], int]:
    """Run a recorder in a process that a fault ends. Return the steps it had written, and its exit status."""
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            with files.failing(fault):
                recorder.run(Program(files.root, lambda steps: os.write(tell, bytes(steps))))
            status = 0
        finally:
            os._exit(status)
    os.close(tell)
    with os.fdopen(told, "rb") as stream:
        written = set(stream.read())
    return written, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def imported(logdir: str) -> list[tuple[str, int]]:
    """The worker and the number of each imported step that can be read, whose side files are right."""
    found = []
    for step in read_recordings(logdir).steps:
        number = step.metadata.step
        assert step.side_file is not None
        assert is_window(Path(step.side_file).read_bytes(), number // 2)
        found.append((step.metadata.worker, number))
    return found


@pytest.mark.parametrize("lasts", [0, FOREVER], ids=["once", "lasting"])
@pytest.mark.parametrize(
    ("kind", "error"),
    [*(("refused", name) for name in ERRORS), ("answer lost", "EIO"), ("half written", "ENOSPC")],
)
def test_an_import_that_fails_leaves_the_old_one_or_the_new_one_and_can_be_repeated(
    files, caplog, kind, error, lasts
):
    at = 0
    while files.hit or not at:
        at += 1
        shutil.rmtree(files.root, ignore_errors=True)
        write_import(files.root, "w", ORIGIN, OLD)
        caplog.clear()
        with files.failing(Fault(kind, getattr(errno, error), at, lasts)):
            try:
                write_import(files.root, "w", ORIGIN, NEW)
                expected = [NEW_STEPS]
            except MemPluginError:
                expected = [OLD_STEPS, NEW_STEPS]
        assert imported(files.root) in expected, (at, files.operations[at - 1])
        assert write_import(files.root, "w", ORIGIN, NEW).written.worker == "w"
        assert imported(files.root) == NEW_STEPS
        assert caplog.messages == []
    assert at > 40


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", KILLS)
@pytest.mark.parametrize("has_links", [True, False], ids=["links", "no links"])
def test_an_import_that_is_killed_leaves_the_old_one_or_the_new_one_and_can_be_repeated(
    files, monkeypatch, kind, has_links
):
    monkeypatch.setattr("tb_memplugin.store.imports.FILL_SECONDS", 0.0)
    if not has_links:
        monkeypatch.setattr(os, "link", no_links)
    at, status = 0, KILLED
    while status == KILLED:
        at += 1
        shutil.rmtree(files.root, ignore_errors=True)
        write_import(files.root, "w", ORIGIN, OLD)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                with files.failing(Fault(kind, at=at)):
                    write_import(files.root, "w", ORIGIN, NEW, "new")
                status = 0
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        found = imported(files.root)
        assert found in (OLD_STEPS, NEW_STEPS), at
        assert imported_as(files.root, "w", ORIGIN, "new") == ("w" if found == NEW_STEPS else None), at
        if found == OLD_STEPS:
            assert write_import(files.root, "w", ORIGIN, NEW, "new").written.worker == "w"
        assert imported(files.root) == NEW_STEPS
        assert imported_as(files.root, "w", ORIGIN, "new") == "w"
        assert imported_as(files.root, "w", ORIGIN, "newer") is None
        assert len(list(Path(files.root).glob("*/events*"))) == 1, at
    assert status == 0
    assert at > 40


def no_links(*_: object) -> None:
    """`os.link` on a file system that has no hard links."""
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


@pytest.mark.parametrize("name", RECORDERS)
def test_a_file_system_without_hard_links_is_as_safe(files, monkeypatch, name):
    monkeypatch.setattr(os, "link", no_links)
    recorder = RECORDERS[name]
    for case in each_case(recorder, files, "refused", "EIO"):
        missing = recorder.peaks.keys() - recorder.read(files.root)["rank0"].keys()
        assert len(missing) <= recorder.most_missing, case
        assert len(case.warnings) <= 1, case


@pytest.mark.parametrize("name", RECORDERS)
@pytest.mark.parametrize(("operation", "lasts"), [("fsync", 0), ("fsync", FOREVER), ("", 0)])
def test_where_the_disk_fails_all_is_written_and_there_is_one_warning(
    tmp_path, monkeypatch, name, operation, lasts
):
    monkeypatch.setattr("tb_memplugin.store.writer.FLUSH_SECONDS", 0.0)
    files = FailingFiles(str(tmp_path / "logdir"))
    files.install(monkeypatch, flushes=True)
    recorder = RECORDERS[name]
    for case in each_case(recorder, files, "refused", "EIO", lasts=lasts, operation=operation):
        missing = recorder.peaks.keys() - recorder.read(files.root).get("rank0", {}).keys()
        assert not missing or not operation, case
        assert len(case.warnings) == 1 or not operation, case
        assert len(case.warnings) <= 1, case
        assert not operation or "could not be flushed to the disk: Input/output" in case.warnings.pop()


@pytest.mark.parametrize("name", RECORDERS)
def test_a_file_system_that_cannot_flush_is_no_problem(tmp_path, monkeypatch, name):
    files = FailingFiles(str(tmp_path / "logdir"))
    files.install(monkeypatch, flushes=True)
    for case in each_case(RECORDERS[name], files, "refused", "EINVAL", lasts=FOREVER, operation="fsync"):
        assert case.warnings == []
        break


@pytest.mark.parametrize("windows_between", [0, 1])
def test_a_failed_write_is_told_unless_the_fault_of_the_flush_before_it_goes_on(
    tmp_path, monkeypatch, windows_between
):
    files = FailingFiles(str(tmp_path / "logdir"))
    files.install(monkeypatch, flushes=True)
    logger, messages = logging.Logger("handler"), Messages()
    logger.addHandler(messages)
    guard = Guard("", logger)
    writer = RunWriter(files.root, "rank0", lambda error: guard.end("a flush", error))
    with files.failing(Fault("refused", errno.EIO, at=1, operation="fsync")):
        writer.write(WINDOWS[0])
    for _ in range(windows_between):
        writer.write(WINDOWS[1])
    for _ in range(2):
        with files.failing(Fault("refused", errno.EIO, 1, FOREVER)), pytest.raises(MemPluginError) as refused:
            writer.write(WINDOWS[2])
        guard.end("a window", refused.value)
    texts = sorted(text.partition(":")[0] for text in messages.warnings)
    expected = ["The memory profile could not be written"] * windows_between
    assert texts == [*expected, "What was recorded could not be flushed to the disk"]


def test_a_write_that_began_before_a_flush_failed_does_not_end_its_fault(tmp_path):
    logdir, full = str(tmp_path), OSError(errno.ENOSPC, "full")
    disk, begin = DiskSync(logdir, print), time.perf_counter()
    assert type(refusal(logdir, full, "not flushed", UnflushedError)) is UnflushedError
    disk.add(begin=begin)
    assert type(refusal(logdir, full, "not written")) is UnflushedError
    disk.add(begin=time.perf_counter())
    assert type(refusal(logdir, full, "not written")) is MemPluginError


def test_two_threads_that_meet_a_fault_at_once_tell_it_as_one_kind(tmp_path, monkeypatch):
    logdir, full, kinds = str(tmp_path), OSError(errno.ENOSPC, "full"), []
    clock = time.perf_counter

    def clock_of_another_thread() -> float:
        monkeypatch.setattr(time, "perf_counter", clock)
        other = threading.Thread(target=lambda: kinds.append(type(refusal(logdir, full, "", UnflushedError))))
        other.start()
        other.join(10)
        return clock()

    monkeypatch.setattr(time, "perf_counter", clock_of_another_thread)
    kinds.append(type(refusal(logdir, full, "not written")))
    assert kinds == [UnflushedError, UnflushedError]


@pytest.mark.parametrize("name", RECORDERS)
def test_where_nothing_can_be_deleted_all_is_written_that_is_told_once_and_the_next_write_deletes(
    tmp_path, monkeypatch, name
):
    files = FailingFiles(str(tmp_path / "logdir"))
    files.install(monkeypatch, flushes=True)
    recorder = RECORDERS[name]
    temporary = lambda: list(Path(files.root).rglob("*.tmp"))  # noqa: E731
    for case in each_case(recorder, files, "refused", "EACCES", lasts=FOREVER, operation="unlink"):
        assert recorder.read(files.root)["rank0"] == recorder.peaks
        assert [text.partition(":")[0] for text in case.warnings] == ["Temporary files could not be deleted"]
        assert temporary() != []
        RunWriter(files.root, "rank0").write(WINDOWS[0])
        assert temporary() == []
        break
