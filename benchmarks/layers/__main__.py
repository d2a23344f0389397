"""`python -m benchmarks.layers record FOLDER [PROGRAM...]` and `compare FOLDER [PROGRAM...]`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def main(arguments: list[str]) -> None:
    what, folder, *chosen = arguments
    if what == "record":
        from benchmarks.layers.programs import PROGRAMS

        # Native frames are named by the library that has them: debug information is not read.
        environment = {**os.environ, "TORCH_DISABLE_ADDR2LINE": "1", "TORCH_SYMBOLIZE_MODE": "dladdr"}
        for name in chosen or PROGRAMS:
            command = [sys.executable, "-m", "benchmarks.layers", "one", folder, name]
            subprocess.run(command, env=environment, check=False)
    elif what == "one":
        from benchmarks.layers.programs import PROGRAMS
        from benchmarks.layers.recording import record

        record(PROGRAMS[chosen[0]], Path(folder) / f"{chosen[0]}.pickle", "all")


if __name__ == "__main__":
    main(sys.argv[1:])
