"""Raise all kinds of errors in each function that a recording calls: `python -m tests.faults [WHO [always]]`.

WHO is a key of `SESSIONS`. Each function raises once per window, or at every call. The tests raise one kind
in each function, or in some of them. All three take half a minute of a core for a tracer, and two for the
handler.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest

from tests.faults.sweep import Session, sweep
from tests.faults.test_callbacks import RecorderSession
from tests.faults.test_handler import HandlerSession, prepare
from tests.faults.test_iterations import ReportSession
from tests.faults.test_launch import ProgramSession
from tests.faults.test_monitor import MonitorSession
from tests.faults.test_oom import OomSession
from tests.faults.test_tracers import LineSession, TracerSession

SESSIONS: dict[str, type[Session]] = {
    "handler": HandlerSession,
    "callbacks": RecorderSession,
    "run": ProgramSession,
    "monitor": MonitorSession,
    "tracer": TracerSession,
    "lines": LineSession,
    "iterations": ReportSession,
    "oom": OomSession,
}


def main(who: str = "handler", mode: str = "") -> int:
    """Print what an error has cost besides its window. Return 1 if anything."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        prepare(patch)
        fired, problems = sweep(SESSIONS[who], Path(folder), 0, 1, every_error=True, always=mode == "always")
    lines = [f"{fired:,} errors raised, {len(problems)} problems.", *problems, ""]
    sys.stdout.write("\n".join(lines))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
