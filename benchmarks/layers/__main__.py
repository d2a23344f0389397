"""`python -m benchmarks.layers record FOLDER [PROGRAM...]` and `compare FOLDER [PROGRAM...]`."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path


def record(folder: Path, chosen: list[str]) -> None:
    """Record programs, each in a process of its own, which begins after the imports."""
    # Native frames are named by the library that has them: debug information is not read.
    os.environ |= {"TORCH_DISABLE_ADDR2LINE": "1", "TORCH_SYMBOLIZE_MODE": "dladdr"}
    from benchmarks.layers.programs import NEW, PROGRAMS
    from benchmarks.layers.recording import record

    every = PROGRAMS | NEW
    for name in chosen or every:
        child = os.fork()
        if not child:
            try:
                record(every[name], folder / f"{name}.pickle", "all")
            except Exception:  # noqa: BLE001  # the child ends here, whatever failed
                traceback.print_exc()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        print(name, "recorded" if (folder / f"{name}.pickle").exists() else "failed", flush=True)


def main(arguments: list[str]) -> None:
    what, folder, *chosen = arguments
    if what == "record":
        record(Path(folder), chosen)
    else:
        from benchmarks.layers.comparison import compare

        compare(Path(folder), chosen)


if __name__ == "__main__":
    main(sys.argv[1:])
