"""`tb-memplugin lines`: a source file with the bytes that its lines hold.

600 bytes are live at the peak: 300 of model.py:2, which model.py:5 called, 90 of model.py:5 itself, and 210
elsewhere.
"""

from __future__ import annotations

import pytest

from tests.commands.files import refused, run, told, write
from tests.snapshots import block, entries, segment, snapshot

SOURCE = "def inner():\n    return torch.empty(300)\n\ndef forward():\n\tx = inner() \x1b[31m\n    return x\n"


def frame(line, name, file="/job/models/model.py"):
    return {"filename": file, "name": name, "line": line}


NATIVE, TRAIN = frame(0, "at::empty", "??"), frame(9, "main", "/job/train.py")
STACKS = (
    [NATIVE, frame(2, "inner"), frame(5, "forward"), TRAIN],
    [NATIVE, frame(5, "forward"), TRAIN],
    [NATIVE, TRAIN],
)


@pytest.fixture
def recording(tmp_path):
    lines = entries("alloc 4096 300", "alloc 4608 90", "alloc 5120 210")
    for entry, frames in zip(lines, STACKS, strict=True):
        entry["frames"] = frames
    end = [segment(block(4096, 300), block(4608, 90), block(5120, 210), total=2 << 20)]
    return write(tmp_path / "recording.pickle", snapshot(end, lines))


def test_without_a_source_file_the_recorded_files_are_listed(recording):
    assert told("lines", recording)["files"] == [
        {"file": "/job/train.py", "bytes": 600, "count": 3},
        {"file": "/job/models/model.py", "bytes": 390, "count": 2},
    ]
    assert "/job/models/model.py" in run("lines", recording).stdout


def test_the_lines_of_a_file_sum_to_what_passes_through_it(recording):
    document = told("lines", recording, "models/model.py")
    assert document == {
        "device": "cuda:0",
        "peak_bytes": 600,
        "file": "/job/models/model.py",
        "lines": [
            {"line": 2, "functions": ["inner"], "bytes": 300, "count": 1, "through_bytes": 300},
            {"line": 5, "functions": ["forward"], "bytes": 90, "count": 1, "through_bytes": 390},
        ],
    }


def test_the_source_is_beside_its_bytes_and_cannot_control_the_terminal(recording, tmp_path):
    (tmp_path / "model.py").write_text(SOURCE)
    shown = run("lines", recording, tmp_path / "model.py", "--context", 1).stdout.splitlines()
    assert shown[1] == "390 B of 600 B pass through this file; 210 B do not"
    assert [line.split(maxsplit=3) for line in shown[3:]] == [
        ["1", "def", "inner():"],
        ["2", "300", "300", "return torch.empty(300)"],
        ["3"],
        ["4", "def", "forward():"],
        ["5", "90", "390", "x = inner() \\x1b[31m"],
        ["6", "return", "x"],
    ]


def test_a_file_of_another_version_and_one_that_is_not_here(recording, tmp_path):
    (tmp_path / "model.py").write_text("one\ntwo\n")
    assert "1 recorded lines are not in the file" in run("lines", recording, tmp_path / "model.py").stdout
    shown = run("lines", recording, "model.py").stdout
    assert shown.splitlines()[3].split() == ["2", "300", "300", "inner"]
    assert "not on this machine" in shown


def test_no_path_of_the_recording_is_opened(tmp_path):
    secret = tmp_path / "secret.py"
    secret.write_text("password = 1")
    lines = entries("alloc 4096 300")
    lines[0]["frames"] = [frame(1, "f", str(secret))]
    path = write(tmp_path / "evil.pickle", snapshot([segment(block(4096, 300), total=2 << 20)], lines))
    assert "password" not in run("lines", path).stdout
    assert "password" not in run("lines", path, "secret.py").stdout


def test_which_file_is_meant(tmp_path, recording):
    assert "No stack passes through a file named 'absent.py'" in refused("lines", recording, "absent.py")
    lines = entries("alloc 4096 300", "alloc 4608 90")
    for entry, folder in zip(lines, "ab", strict=True):
        entry["frames"] = [frame(1, "f", f"/{folder}/model.py")]
    end = [segment(block(4096, 300), block(4608, 90), total=2 << 20)]
    path = write(tmp_path / "two.pickle", snapshot(end, lines))
    assert "/a/model.py, /b/model.py" in refused("lines", path, "model.py")
    assert told("lines", path, "b/model.py")["lines"][0]["bytes"] == 90


def test_a_range(recording):
    assert told("lines", recording, "model.py", "--until", "0x1000")["peak_bytes"] == 300
    assert told("lines", recording, "--until", "0x1000")["files"][0]["bytes"] == 300
