"""Output that cannot be written: the error says so, and does not blame the file that was read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tb_memplugin.store.writer import RunWriter
from tests.traces import trace


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize("arguments", [("summary",), ("peak",), ("export", "--to", "csv", "-o", "-")])
def test_a_full_disk_behind_stdout_is_told_as_that(tmp_path, arguments):
    RunWriter(str(tmp_path), "w").write(trace("step 0", "alloc 10 a"))
    command, *options = arguments
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "tb_memplugin", command, str(tmp_path), *options],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr.startswith("error: The output cannot be written: No space left on device.")
    assert "fix: Free some disk space" in done.stderr
