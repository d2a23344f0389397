"""Whatever a file system does to a reader: it names the file and the reason, and forgets both afterwards."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest

from tb_memplugin.errors import MemPluginError
from tb_memplugin.store.reader import read_recordings
from tb_memplugin.store.writer import RunWriter
from tests.faults.failing_files import FOREVER, FailingFiles, Fault
from tests.faults.test_faults import WINDOWS
from tests.server.tab import Tab

ERRORS = ("EIO", "ESTALE", "EACCES", "EMFILE", "ENOENT")
RUNS = ("one", "two")


@pytest.fixture
def files(tmp_path, monkeypatch):
    files = FailingFiles(str(tmp_path / "logdir"))
    files.install(monkeypatch)
    files.install_reads(monkeypatch)
    for run in RUNS:
        RunWriter(f"{files.root}/{run}", "rank0").write(WINDOWS[0])
    return files


def says(text: str, error: str) -> bool:
    """Whether a text names a file in the logdir's runs and the reason, as far as there is one."""
    reason = os.strerror(getattr(errno, error))
    return any(run in text for run in (*RUNS, "logdir")) and (reason in text or error == "ENOENT")


@pytest.mark.parametrize("error", ERRORS)
def test_commands_read_the_other_runs_and_name_what_they_could_not_read(files, error):
    reason = "There is no such folder" if error == "ENOENT" else os.strerror(getattr(errno, error))
    with files.failing(Fault("refused", getattr(errno, error), 1)), pytest.raises(MemPluginError) as raised:
        read_recordings(files.root)  # of the logdir itself nothing is known
    assert reason in str(raised.value)
    at = 1
    while files.hit:
        at += 1
        with files.failing(Fault("refused", getattr(errno, error), at)):
            recordings = read_recordings(files.root)
        case = (at, files.operations[at - 1 :][:1], [str(problem) for problem in recordings.problems])
        read = {step.folder.split("/")[-2] for step in recordings.steps}
        if read < set(RUNS) and error != "ENOENT":
            assert recordings.problems, case
        assert len(read) >= 1 or files.operations[at - 1] == "scandir", case
        assert all(says(str(problem), error) for problem in recordings.problems), case
        assert len(read_recordings(files.root).steps) == 4
    assert at > 10


@pytest.mark.parametrize("lasts", [0, FOREVER], ids=["once", "lasting"])
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("route", ["runs", "curve", "step"])
def test_the_tab_shows_the_other_runs_and_after_the_fault_everything(files, route, error, lasts):
    asked: dict[str, Any] = (
        {} if route == "runs" else {"run": "one", "worker": "rank0", "step": 0, "device": "cpu"}
    )
    whole = Tab(files.root).get(route, **asked)
    at = 0
    while files.hit or not at:
        at += 1
        tab = Tab(files.root)
        with files.failing(Fault("refused", getattr(errno, error), at, lasts)):
            status, answer = tab.answer(route, **asked)
        case = (at, files.operations[at - 1 :][:1], status, answer)
        if route == "runs":
            assert status == 200, case
            assert answer["runs"] == whole["runs"], case
            told = [f"{problem['file'] or 'logdir'} {problem['reason']}" for problem in answer["problems"]]
            assert all(says(text, error) for text in told), case
            assert told or not files.hit or error == "ENOENT" or not lasts, case
        elif status == 200:
            assert answer == whole or lasts or files.hit, case
        else:
            assert 400 <= status < 500, case
            assert says(f"{answer['error']}", error), case
        assert tab.get(route, **asked) == whole, case
    assert at > 1
