"""Print the tables as Markdown: `python -m benchmarks.on_gpu [SUBJECT...] [--device cpu] [--out FILE]`."""

from __future__ import annotations

import argparse
import logging
import platform
import warnings
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from importlib import import_module
from pathlib import Path

import torch

SUBJECTS = ("peaks", "cost", "estimate", "scripts")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.on_gpu")
    parser.add_argument("subjects", nargs="*", choices=[*SUBJECTS, []], help="all of them, if none is named")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, help="a file that the tables are added to")
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here; --device cpu tries the same commands, small")
    logging.getLogger("tb_memplugin").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    for line in _lines(given.subjects or SUBJECTS, given.device):
        print(line, flush=True)
        if given.out is not None:
            with given.out.open("a", encoding="utf-8") as stream:
                stream.write(line + "\n")


def _lines(subjects: Sequence[str], device: str) -> Iterator[str]:
    name = torch.cuda.get_device_name() if device == "cuda" else f"{platform.processor() or 'a'} CPU, small"
    day = f"{datetime.now(timezone.utc):%Y-%m-%d}"
    yield f"\n{day}, {name}, torch {torch.__version__}, CUDA {torch.version.cuda}:"
    for subject in subjects:
        yield ""
        yield from import_module(f"benchmarks.on_gpu.{subject}").table(device)


if __name__ == "__main__":
    main()
