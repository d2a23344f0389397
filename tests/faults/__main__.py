"""Raises every kind of error in every function of a handler's recording: `python -m tests.faults`.

The tests raise one kind in each. All three take about ten minutes.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest

from tests.faults.sweep import sweep
from tests.faults.test_handler import HandlerSession, prepare


def main() -> int:
    """Print what an error has cost besides its window. Return 1 if anything."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        prepare(patch)
        fired, problems = sweep(HandlerSession, Path(folder), 0, 1, every_error=True)
    lines = [f"{fired:,} errors raised, {len(problems)} problems.", *problems, ""]
    sys.stdout.write("\n".join(lines))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
