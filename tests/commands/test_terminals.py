"""The commands on terminals and pipes of every kind: real processes, for the streams are the point."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.commands.files import PROGRAM, step_snapshot, write


def process(*arguments, **environment):
    done = subprocess.run(
        [*PROGRAM, *map(str, arguments)],
        capture_output=True,
        timeout=60,
        check=False,
        env={**os.environ, **environment},
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.fixture
def step(tmp_path):
    content = step_snapshot()
    content["device_traces"][0][0]["frames"] = [
        {"filename": "größe.py", "name": "inner", "line": 1},
        {"filename": "model.py", "name": "forward", "line": 7},
    ]
    return write(tmp_path / "step.pickle", content)


def test_an_encoding_that_lacks_a_character_stops_nothing(step):
    code, out, error = process("peak", step, "--by", "stack", PYTHONIOENCODING="ascii", COLUMNS="200")
    assert (code, error) == (0, "")
    assert r"inner gr\xf6\xdfe.py:1 \u2190 forward model.py:7" in out


@pytest.mark.parametrize("columns", ["1", "10", "24", "79"])
def test_a_narrow_terminal_cuts_no_number(step, columns):
    _, out, _ = process("diff", step, step, PYTHONIOENCODING="utf-8", COLUMNS=columns)
    total = next(line.split() for line in out.splitlines() if line.split()[:1] == ["total"])
    assert total == ["total", "390", "390", "0"]


@pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="no /dev/stdout here")
def test_an_export_goes_into_a_pipe(step):
    code, out, _ = process("export", step, "--to", "csv", "--no-stacks", "-o", "/dev/stdout")
    assert code == 0
    assert out.splitlines()[1].startswith("cuda:0,")


@pytest.mark.skipif(not Path("/dev/stdin").exists(), reason="no /dev/stdin here")
def test_a_pipe_as_input_is_refused_with_what_to_do(step):
    done = subprocess.run(
        [*PROGRAM, "peak", "/dev/stdin"],
        input=step.read_bytes(),
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert b"it is a pipe, not a file" in done.stderr
    assert b"Save its content to a file first." in done.stderr
