"""Run Python on a stand-in for a GPU, see docs/gpu.md: `python -m tests.gpu.standin -m pytest tests/gpu`."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from tests.gpu.standin.build import build

ASKED = {} if os.environ.get("STANDIN_CUDNN_WORKSPACES") == "1" else {"TB_MEMPLUGIN_CUDNN": "none"}
"""Estimates count workspaces of cuDNN where the stand-in has them."""


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="standin") as folder:
        library, libraries = build(Path(folder))
        environment = {
            **os.environ,
            **ASKED,
            "LD_PRELOAD": str(library),
            "LD_LIBRARY_PATH": os.pathsep.join([str(libraries), os.environ.get("LD_LIBRARY_PATH", "")]),
        }
        sys.exit(os.spawnve(os.P_WAIT, sys.executable, [sys.executable, *sys.argv[1:]], environment))


if __name__ == "__main__":
    main()
