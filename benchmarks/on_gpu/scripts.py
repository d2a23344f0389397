"""The peaks of whole scripts: by `tb-memplugin estimate -- python ...`, and as the allocator counts them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.estimate import programs

HOME = Path(programs.__file__).parents[1]
SCRIPTS = sorted(
    path
    for folder in ("programs", "fixtures/trainings")
    for path in (HOME / folder).glob("*.py")
    if path.stem not in ("__init__", "counted")
)
"""Small programs that tests run, and trainings of up to 7 GB; some want torchvision or transformers."""
SECONDS = 300


def table(device: str) -> Iterator[str]:
    """Yield a row for each script; that of one that fails has the error. On the CPU: the estimates alone."""
    yield "| script | peak, allocated | estimated | off | reserved | estimated | off |"
    yield "|---|---|---|---|---|---|---|"
    gpu = torch.cuda.get_device_name() if device == "cuda" else "h100"
    for path in SCRIPTS:
        name = path.relative_to(HOME).with_suffix("").as_posix()
        try:
            counted = _counted(path) if device == "cuda" else (0, 0)
            estimated = _estimated(path, gpu)
        except subprocess.SubprocessError as error:
            said = str(getattr(error, "stderr", "") or error).strip().splitlines()
            yield f"| {name} | {said[-1][:120] if said else error} | | | | | |"
            continue
        cells = [
            f"{bytes_:,} | {guess:,} | {_off(guess, bytes_)}"
            for bytes_, guess in zip(counted, estimated, strict=True)
        ]
        yield f"| {name} | {' | '.join(cells)} |"


def _off(estimated: int, counted: int) -> str:
    return f"{100 * (estimated / counted - 1):+.2f} %" if counted else ""


def _counted(path: Path) -> tuple[int, int]:
    """Run a script in a process of its own and return its peaks: allocated and reserved bytes."""
    last = _output(["-m", "tests.estimate.programs.counted", str(path)]).split()
    return int(last[-2]), int(last[-1])


def _estimated(path: Path, gpu: str) -> tuple[int, int]:
    command = ["-m", "tb_memplugin", "estimate", "--gpu", gpu, "--steps", "1000", "--json"]
    text = _output([*command, "--", "python", str(path)])
    answer = json.loads(text)
    return int(answer["peak_allocated_bytes"]), int(answer["peak_reserved_bytes"])


def _output(arguments: list[str]) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], check=True, capture_output=True, text=True, timeout=SECONDS
    )
    return done.stdout
