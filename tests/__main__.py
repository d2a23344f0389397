"""Runs the tests, two folders of them at a time: `python -m tests` and `python -m tests sweeps`.

A free process takes the next folder, the longest first. Further arguments are pytest's. Each line of output
begins with the name of its folder. The end lists what took longest, what ran twice and what failed.
pytest-xdist is not used: its workers have a thread of their own, and a recorder sees whether a program has
other threads.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from tests.leftovers import end_with_this_process

SWEEPS = (
    "tests/certificate/test_never_in_the_way.py",
    "tests/faults",
    "tests/estimate/ranks",
    "tests/read/test_categories.py",
    "tests/record/test_without_private_names.py",
    "tests/commands/test_estimate_configs.py",
)
"""What tries everything there is of a kind, such as each failure of each file operation: `make sweeps`."""

LONGEST = ("tests/browser", "tests/estimate", "tests/record")
"""What starts first, so that both processes end at about the same time."""

LOOSE = "tests"
"""What the files that are in no folder are called together."""

NO_TESTS = 5
"""pytest's exit status where arguments deselect every test."""


@dataclass
class Result:
    """What pytest did in one folder."""

    folder: str
    status: int
    seconds: float
    files: dict[str, float] = field(default_factory=dict)
    """Seconds in each file."""
    tests: dict[str, float] = field(default_factory=dict)
    """Seconds in each test."""
    summary: list[str] = field(default_factory=list)
    """A line for each test that ran twice or failed."""


def main(arguments: Sequence[str]) -> int:
    """Run the folders and return 1 if one failed, 0 if none did."""
    end_with_this_process()
    sweeps = list(arguments[:1]) == ["sweeps"]
    options = arguments[1:] if sweeps else [*arguments, *(f"--ignore={path}" for path in SWEEPS)]
    began = time.monotonic()
    with ThreadPoolExecutor(2) as processes:
        folders = {name: [name] for name in SWEEPS} if sweeps else _folders()
        results = list(processes.map(lambda name: _run(name, folders[name], options), folders))
    failed = [result for result in results if result.status not in (0, NO_TESTS)]
    lines = [*_longest(results), *(line for result in results for line in result.summary)]
    lines += [f"{result.folder}: pytest ended with exit status {result.status}" for result in failed]
    minutes = (time.monotonic() - began) / 60
    lines += [f"{'FAILED' if failed else 'passed'}: {len(results)} folders in {minutes:.1f} minutes"]
    sys.stdout.write("\n".join(lines) + "\n")
    return int(bool(failed))


def _folders() -> dict[str, list[str]]:
    """Return the folders of tests with what to run there; the files that are in none count as one."""
    root = Path(__file__).parent
    files = sorted(f"tests/{path.name}" for path in root.glob("test_*.py"))
    folders = {f"tests/{path.parent.relative_to(root).parts[0]}" for path in root.glob("*/**/test_*.py")}
    named = [*LONGEST, *sorted(folders - {*LONGEST, *SWEEPS})]
    return {LOOSE: files, **{name: [name] for name in named}}


def _run(folder: str, paths: Sequence[str], options: Sequence[str]) -> Result:
    """Run pytest in one folder, and print its output line by line."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        report = Path(temporary) / "report.xml"
        command = [sys.executable, "-m", "pytest", *paths, f"--junitxml={report}", *options]
        summary = []
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                sys.stdout.write(f"{folder.removeprefix('tests/')}| {line}")
                sys.stdout.flush()
                if line.startswith("RERUN "):
                    summary.append(line.rstrip())
        result = Result(folder, process.returncode, time.monotonic() - began, summary=summary)
        if report.exists():
            for case in ET.parse(report).iter("testcase"):
                _add_test(result, case)
    return result


def _add_test(result: Result, case: ET.Element[Any]) -> None:
    seconds = float(case.get("time", 0))
    file = case.get("classname", "")
    result.files[file] = result.files.get(file, 0) + seconds
    name = f"{file}::{case.get('name', '')}"
    result.tests[name] = seconds
    for failure in (*case.iter("failure"), *case.iter("error")):
        message = (failure.get("message", "").splitlines() or [""])[0]
        result.summary.append(f"FAILED {name}: {message[:300]}")


def _longest(results: Sequence[Result]) -> list[str]:
    """Return lines with the seconds of the folders, files and tests that took longest."""
    durations = {
        "folder": {result.folder: result.seconds for result in results},
        "file": {file: seconds for result in results for file, seconds in result.files.items()},
        "test": {test: seconds for result in results for test, seconds in result.tests.items()},
    }
    lines = []
    for title, seconds in durations.items():
        longest = sorted(seconds.items(), key=lambda item: -item[1])[:20]
        lines += [f"{'seconds':>8}  {title}", *(f"{number:8.1f}  {name}" for name, number in longest)]
    return lines


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
