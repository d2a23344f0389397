"""Whatever an object store answers: what was written stays, writers go on, readers name what they miss."""

from __future__ import annotations

import errno
import logging
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import fsspec
import pytest

from tb_memplugin.errors import MemPluginError
from tb_memplugin.store.imports import write_import
from tb_memplugin.store.reader import load_window, read_recordings
from tests.faults.failing_files import FOREVER
from tests.faults.failing_s3 import FailingS3, serving
from tests.faults.test_faults import (
    NEW,
    NEW_STEPS,
    OLD,
    OLD_STEPS,
    ORIGIN,
    RECORDERS,
    WINDOWS,
    Messages,
    Program,
)
from tests.traces import same

REQUESTS = ("info", "ls", "pipe_file", "cat_file", "makedirs", "rm_file", "rmdir", "open", "isdir")


class ClientError(Exception):
    """An error of a client's own kind, as those of botocore are."""


ERRORS = {
    "503": OSError(errno.EIO, "503 Slow Down"),
    "timeout": TimeoutError("Read timeout on endpoint"),
    "reset": ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
    "500": ClientError("500 Internal Server Error"),
}


@dataclass
class FailingStore:
    """fsspec's store in memory, whose requests fail from one on: refused, or done without an answer."""

    root = "memory://"
    stride = 1
    texts: ClassVar = {name: (str(error).partition("] ")[2],) for name, error in ERRORS.items()}

    count: int = 0
    hit: bool = False
    at: int = 0
    lasts: int = 0
    is_done: bool = False
    error: Exception | None = None
    is_inside: bool = False

    def install(self, patch: pytest.MonkeyPatch) -> None:
        system = type(fsspec.filesystem("memory"))
        for name in REQUESTS:
            patch.setattr(system, name, self._failing(getattr(system, name)))

    @contextmanager
    def failing(self, error: str, at: int, *, lasts: int, is_done: bool) -> Iterator[None]:
        self.count, self.hit, self.error = 0, False, ERRORS[error]
        self.at, self.lasts, self.is_done = at, lasts, is_done
        try:
            yield
        finally:
            self.error = None

    @contextmanager
    def whole(self) -> Iterator[None]:
        error, self.error = self.error, None
        try:
            yield
        finally:
            self.error = error

    def _failing(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def request(*args: Any, **keywords: Any) -> Any:
            if self.error is None or self.is_inside:
                return real(*args, **keywords)
            self.is_inside = True
            try:
                self.count += 1
                if not self.at <= self.count <= self.at + self.lasts:
                    return real(*args, **keywords)
                self.hit = True
                if self.is_done and self.count == self.at:
                    real(*args, **keywords)
                raise self.error
            finally:
                self.is_inside = False

        return request


@pytest.fixture(params=["memory", pytest.param("s3", marks=pytest.mark.slow)])
def store(request, monkeypatch: pytest.MonkeyPatch) -> Iterator[FailingStore | FailingS3]:
    monkeypatch.setattr("tb_memplugin.store.imports.FILL_SECONDS", 0.0)
    if request.param == "s3":
        with serving(monkeypatch) as served:
            yield served
    else:
        in_memory = FailingStore()
        in_memory.install(monkeypatch)
        yield in_memory


@pytest.fixture
def folders(store: FailingStore | FailingS3) -> Iterator[Callable[[], str]]:
    """A function that returns a new folder in the store."""
    root = f"{store.root}{uuid.uuid4().hex}"
    yield lambda: f"{root}/{uuid.uuid4().hex}"
    system, inner = fsspec.core.url_to_fs(root)
    if system.exists(inner):
        system.rm(inner, recursive=True)


def read(logdir: str) -> dict[str, dict[int, int]]:
    """The peak of each step that can be read, by worker and step; side files are right."""
    peaks: dict[str, dict[int, int]] = {}
    try:
        recordings = read_recordings(logdir)
    except MemPluginError as error:
        assert "no such folder" in str(error)  # noqa: PT017
        return {}
    assert recordings.problems == ()
    for step in recordings.steps:
        number = step.metadata.step
        assert step.side_file is not None
        assert same(load_window(step.side_file), WINDOWS[number // 2])
        peaks.setdefault(step.metadata.worker, {})[number] = step.summary().devices[0].stats.peak_bytes
    for watched in recordings.watched:
        assert watched.figures.notes == ()
        values = watched.figures.devices[0].peak.tolist()
        peaks[watched.worker] = dict(zip(watched.figures.steps.tolist(), values, strict=True))
    return peaks


@pytest.mark.parametrize("name", RECORDERS)
@pytest.mark.parametrize(
    ("error", "is_done", "lasts"),
    [
        ("503", False, 0),
        ("reset", True, 0),
        ("500", True, 0),
        ("500", False, FOREVER),
        ("timeout", False, FOREVER),
    ],
)
def test_what_a_recorder_wrote_stays_and_it_goes_on(store, folders, name, error, is_done, lasts):
    recorder, log, at = RECORDERS[name], logging.getLogger("tb_memplugin"), 0
    while store.hit or not at:
        at += store.stride
        logdir, safe, messages = folders(), set[int](), Messages()

        def check(written: Sequence[int], logdir: str = logdir, safe: set[int] = safe) -> None:
            with store.whole():
                found = read(logdir)
            assert found.keys() <= {"rank0"}
            steps = found.get("rank0", {})
            assert steps.items() <= recorder.peaks.items()
            assert safe | set(written) <= steps.keys()
            safe |= steps.keys()

        log.addHandler(messages)
        program = Program(logdir, check)
        with store.failing(error, at, lasts=lasts, is_done=is_done):
            recorder.run(program)
            check(())
        log.removeHandler(messages)
        warnings = program.warnings + messages.warnings
        missing = recorder.peaks.keys() - read(logdir).get("rank0", {}).keys()
        assert len(warnings) <= 1, (at, warnings)
        assert warnings or not missing, at
        assert lasts or len(missing) <= recorder.most_missing, at
    assert at > 10


@pytest.mark.parametrize(("error", "is_done"), [("timeout", False), ("500", True)])
def test_an_import_is_the_old_one_or_the_new_one_and_can_be_repeated(store, folders, error, is_done):
    at = 0
    while store.hit or not at:
        at += store.stride
        logdir = folders()
        write_import(logdir, "w", ORIGIN, OLD)
        expected = [NEW_STEPS]
        with store.failing(error, at, lasts=0, is_done=is_done):
            try:
                write_import(logdir, "w", ORIGIN, NEW)
            except MemPluginError:
                expected = [OLD_STEPS, NEW_STEPS]
        steps = [(step.metadata.worker, step.metadata.step) for step in read_recordings(logdir).steps]
        assert steps in expected, at
        assert write_import(logdir, "w", ORIGIN, NEW).written.worker == "w", at
        assert list(read(logdir)) == ["w"], at
    assert at > 10


@pytest.mark.parametrize("error", ERRORS)
def test_a_reader_names_what_it_could_not_read_and_shows_everything_afterwards(store, folders, error):
    logdir, at = folders(), 0
    for run in ("one", "two"):
        RECORDERS["handler"].run(Program(f"{logdir}/{run}", lambda _: None))
    while store.hit or not at:
        at += store.stride
        with store.failing(error, at, lasts=0, is_done=False):
            try:
                recordings = read_recordings(logdir)
                assert recordings.problems or len(recordings.steps) == 12, at
            except MemPluginError as refusal:
                assert any(text in str(refusal) for text in store.texts[error])  # noqa: PT017
        assert len(read_recordings(logdir).steps) == 12
    assert at > 5
