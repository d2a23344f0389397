"""What a test run has started ends with it, also when the run is killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.browser.conftest import NAMES

ROOT = Path(__file__).resolve().parent.parent
SERVER_AND_BROWSER = """
import time
from playwright.sync_api import sync_playwright
from tests.browser.conftest import QUIET
from tests.tensorboard.process import tensorboard

def test_that_hangs(tmp_path):
    with tensorboard(tmp_path) as server, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path={chromium!r}, headless=True, args=list(QUIET))
        browser.new_page().goto("about:blank")
        print("started", flush=True)
        time.sleep(600)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the watcher reads /proc")
def test_a_server_and_a_browser_end_when_the_test_run_is_killed(tmp_path: Path) -> None:
    chromium = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if chromium is None:
        pytest.skip("no Chromium or Chrome: install one, or set CHROMIUM (make test does)")
    test = tmp_path / "test_hanging.py"
    test.write_text(SERVER_AND_BROWSER.format(chromium=chromium), "utf-8")
    command = [sys.executable, "-m", "pytest", "-s", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    run = subprocess.Popen(
        [*command, "--rootdir", str(tmp_path), str(test)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    assert any("started" in line for line in run.stdout)
    below = descendants(run.pid)
    commands = " ".join(map(command_of, below))
    assert "tensorboard.main" in commands
    assert "--type=renderer" in commands
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    end = time.monotonic() + 20
    while time.monotonic() < end and any(map(is_running, below)):
        time.sleep(0.1)
    assert list(map(command_of, filter(is_running, below))) == []


def descendants(process: int) -> list[int]:
    """Return the processes below a process."""
    children = [
        int(child)
        for task in Path(f"/proc/{process}/task").iterdir()
        for child in (task / "children").read_text("ascii").split()
    ]
    return children + [below for child in children for below in descendants(child)]


def command_of(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_text("utf-8").replace("\0", " ")
    except OSError:
        return ""


def is_running(process: int) -> bool:
    """Return whether a process exists and has not ended; nobody may have asked yet how it ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text("utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
