"""A file that would hang or crash its reader ends in a refusal: commands read files in a child process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tb_memplugin.commands import IN_THIS_PROCESS, SUB_COMMANDS, main
from tests.cli import CliRunner
from tests.commands.files import PROGRAM, step_snapshot, write

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the system cannot fork")

DICT, AND_ITSELF, ROW = b"\x80\x04})", b"q\x00h\x00\x86", b"Ns."
ENDLESS = DICT + AND_ITSELF * 60 + ROW
"""A key that is a pair of one pair, and so on, 60 deep: hashing it visits 2**60 pairs."""

DEEP = DICT + b"\x85" * 3_000_000 + ROW
"""A key of three million tuples in each other: hashing it takes more stack than there is."""


def program(*arguments: object, seconds: int = 1) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *map(str, arguments)],
        env={**os.environ, "TB_MEMPLUGIN_LIMIT_SECONDS": str(seconds)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_what_the_command_says_and_its_exit_code_come_through(tmp_path):
    path = write(tmp_path / "a.pickle", step_snapshot())
    done = program("peak", path, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert '"peak_bytes": 390' in done.stdout
    assert program("peak", tmp_path / "absent").returncode == 2


@pytest.mark.parametrize(
    ("content", "told"),
    [(ENDLESS, "takes far too long"), (DEEP, "crashed (signal 11)")],
    ids=["endless", "deep"],  # pytest would spell the bytes out, and hand them to every process as a variable
)
def test_a_key_without_end_is_refused(content, told, tmp_path):
    path = tmp_path / "bomb.pickle"
    path.write_bytes(content)
    done = program("peak", path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert told in done.stderr
    assert str(path) in done.stderr


def test_a_command_that_the_system_ends_says_so():
    fork = "from tb_memplugin.commands.apart import fork_guarded; fork_guarded()"
    ended = f"{fork}; import os; os.kill(os.getpid(), 9)"
    done = subprocess.run([sys.executable, "-c", ended], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "was killed (signal 9)" in done.stderr


def test_a_command_without_memory_says_so(monkeypatch, tmp_path):
    def load(*_arguments, **_options):
        raise MemoryError

    monkeypatch.setattr("tb_memplugin.commands.opening.load", load)
    done = CliRunner().invoke(main, ["peak", str(write(tmp_path / "a.pickle", step_snapshot()))])
    assert done.exit_code == 2
    assert "The command needs more memory than there is" in done.stderr


def test_the_limit_can_be_raised_and_is_checked(tmp_path):
    path = write(tmp_path / "a.pickle", step_snapshot())
    assert program("peak", path, seconds=100).returncode == 0
    refused = program("peak", path, seconds=-1)
    assert refused.returncode == 2
    assert "'-1', which is not a number of seconds" in refused.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 1), (signal.SIGTERM, 143)])
def test_a_command_that_hangs_can_be_ended(number, code, tmp_path):
    path = tmp_path / "bomb.pickle"
    path.write_bytes(ENDLESS)
    begun = subprocess.Popen(
        [*PROGRAM, "peak", str(path)],
        env={**os.environ, "TB_MEMPLUGIN_LIMIT_SECONDS": "1000"},
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    while not any(cpu_seconds(one) > 2 for one in children(begun.pid)):
        assert begun.poll() is None
        time.sleep(0.1)
    child = children(begun.pid)
    os.killpg(begun.pid, number)
    begun.wait(timeout=20)
    assert begun.returncode == code
    assert child
    assert not any(Path(f"/proc/{one}").exists() for one in child)


def cpu_seconds(process: str) -> float:
    """Return how long a process has computed: the 14th field of its line, in ticks (man 5 proc)."""
    fields = Path(f"/proc/{process}/stat").read_text("ascii").rpartition(")")[2].split()
    return int(fields[11]) / os.sysconf("SC_CLK_TCK")


def children(process: int) -> list[str]:
    return Path(f"/proc/{process}/task/{process}/children").read_text("ascii").split()


def test_every_command_that_reads_files_is_guarded():
    assert set(SUB_COMMANDS) > IN_THIS_PROCESS == {"estimate", "doctor", "run", "view", "mcp"}
