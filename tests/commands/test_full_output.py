"""Streams that are full or closed: an error that blames no file, or the command without its output."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tb_memplugin.store.writer import RunWriter
from tests.traces import trace

ROOT = Path(__file__).resolve().parents[2]
COMMAND = (sys.executable, "-m", "tb_memplugin")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize(
    "arguments",
    [
        ("summary", "RUN"),
        ("peak", "RUN"),
        ("export", "RUN", "--to", "csv", "-o", "-"),
        ("-h",),
        ("--version",),
    ],
)
def test_a_full_disk_behind_stdout_is_told_as_that(tmp_path, arguments):
    RunWriter(str(tmp_path), "w").write(trace("step 0", "alloc 10 a"))
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*COMMAND, *(str(tmp_path) if word == "RUN" else word for word in arguments)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr.startswith("error: The output cannot be written: No space left on device.")
    assert "fix: Free some disk space" in done.stderr


@pytest.mark.skipif(os.name != "posix", reason="a shell of POSIX closes the streams")
@pytest.mark.parametrize(
    ("command", "closed", "code", "errors"),
    [
        ("peak run", ">&-", 0, ""),
        ("peak run", "2>&-", 0, ""),
        ("peak run", "<&- >&- 2>&-", 0, ""),
        ("peak absent", "2>&-", 2, ""),
        ("peak -", "<&-", 2, "error: Standard input is empty."),
        ("export run --to csv -o out.csv", ">&- 2>&-", 0, ""),
    ],
)
def test_a_stream_that_the_shell_has_closed_changes_no_exit_code(tmp_path, command, closed, code, errors):
    RunWriter(str(tmp_path / "run"), "w").write(trace("step 0", "alloc 10 a"))
    done = subprocess.run(
        f'exec "{sys.executable}" -m tb_memplugin {command} {closed}',
        shell=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code
    assert done.stderr.partition("\n")[0] == errors
