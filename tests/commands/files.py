"""Small files for commands, with numbers that a person can add up, and real ones where they are at hand.

STEP: 300 bytes in the model's forward stay, 90 of the optimizer come and go. The peak is 390 at event 1.
"""

from __future__ import annotations

import json
import pickle
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from tb_memplugin.commands import main
from tb_memplugin.exports.formats import FORMATS
from tests.cli import CliRunner
from tests.snapshots import block, entries, segment, snapshot

DATA = Path(__file__).parents[2].parent / "shared" / "data"
real = pytest.mark.skipif(not DATA.is_dir(), reason=f"{DATA} holds strangers' files; it is absent")

WRITTEN_FORMATS = [
    pytest.param(
        name,
        marks=[pytest.mark.skipif(find_spec("pyarrow") is None, reason="pyarrow is not installed")]
        * (name == "parquet"),
    )
    for name in FORMATS
]
"""Every format of `export`, as parameters of a test."""

PROGRAM = [sys.executable, "-c", "from tb_memplugin.commands import main; main()"]
"""The command in a process of its own."""

FORWARD = [
    {"filename": "??", "name": "at::empty", "line": 0},
    {"filename": "model.py", "name": "forward", "line": 7},
]
UPDATE = [{"filename": "optim.py", "name": "step", "line": 3}]


def stranger(pattern: str) -> Path:
    return next(DATA.glob(pattern))


def step_snapshot(kept: int = 300, device: int = 0, **fields: Any) -> dict[str, Any]:
    lines = entries(f"alloc 4096 {kept}", "alloc 4608 90", "free_requested 4608 90", "free_completed 4608 90")
    for entry, frames in zip(lines, (FORWARD, UPDATE, [], []), strict=True):
        entry["frames"] = frames
    before: list[list[dict[str, Any]]] = [[] for _ in range(device)]
    return {**snapshot([segment(block(4096, kept), total=2 << 20, device=device)], *before, lines), **fields}


def failing_snapshot() -> dict[str, Any]:
    """300 bytes are live when 9,000 are asked for with 77 free on the device."""
    lines = entries("alloc 4096 300", "oom 77 9000", "free_completed 4096 300")
    return snapshot([segment(block(4096, 0, "inactive", 2048))], lines)


def write(path: Path, content: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(content))
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def told(*arguments: object) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def refused(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    return result.stderr
