"""Whatever a file system does to an export: the earlier file or the new one is there, whole."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from tb_memplugin.commands import main
from tb_memplugin.store.writer import RunWriter
from tests.faults.failing_files import FOREVER, FailingFiles, Fault
from tests.traces import trace

WINDOW = trace("step 5", "alloc 100 a", "free a")
FORMATS = ("csv", "html", "snapshot")
OLD = b"a good earlier file"


def run(*arguments: object) -> int:
    """The exit status of the command."""
    with pytest.raises(SystemExit) as ended:
        main(list(map(str, arguments)))
    return int(ended.value.code or 0)


@pytest.fixture
def files(tmp_path, monkeypatch):
    files = FailingFiles(str(tmp_path / "out"))
    files.install(monkeypatch)
    return files


@pytest.fixture
def window(tmp_path) -> str:
    return RunWriter(str(tmp_path / "run"), "rank0").write(WINDOW).side_file


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize(
    ("kind", "error", "lasts"),
    [
        ("refused", "ENOSPC", 0),
        ("refused", "EIO", FOREVER),
        ("answer lost", "ESTALE", 0),
        ("half written", "EDQUOT", 0),
        ("short", "EIO", 0),
    ],
)
def test_an_export_replaces_a_file_whole_or_not_at_all(files, window, capsys, format_, kind, error, lasts):
    folder = Path(files.root)
    folder.mkdir()
    target = folder / "out"
    assert run("export", window, "--to", format_, "-o", target) == 0
    new = target.read_bytes()
    at = 0
    while True:
        at += 1
        target.write_bytes(OLD)
        capsys.readouterr()
        with files.failing(Fault(kind, getattr(errno, error), at, lasts)):
            status = run("export", window, "--to", format_, "-o", target)
        if not files.hit:
            break
        said = capsys.readouterr().err
        case = (at, files.operations[at - 1], said)
        assert len(target.read_bytes()) == len(new) if status == 0 else target.read_bytes() == OLD, case
        assert status == 0 or (status == 2 and os.strerror(getattr(errno, error)) in said), case
        assert "Traceback" not in said, case
        left = {path.name for path in folder.iterdir()} - {"out"}
        assert not left or lasts, case
        for name in left:
            (folder / name).unlink()
    assert at > 5


def test_a_link_is_followed_or_stays(files, window):
    folder = Path(files.root)
    folder.mkdir()
    (folder / "link").symlink_to(folder / "real")
    at = 0
    while files.hit or not at:
        at += 1
        (folder / "real").write_bytes(OLD)
        with files.failing(Fault("refused", errno.EIO, at)):
            status = run("export", window, "--to", "json", "-o", folder / "link")
        assert (folder / "link").is_symlink(), at
        if status == 0:
            assert json.loads((folder / "real").read_bytes())
        else:
            assert (folder / "real").read_bytes() == OLD
    assert at > 5
