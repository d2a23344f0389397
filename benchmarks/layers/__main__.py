"""`python -m benchmarks.layers record FOLDER [PROGRAM...]` and `compare FOLDER [PROGRAM...]`.

`record-kineto` and `compare-kineto` do the same with profiles.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path


def record(folder: Path, chosen: list[str]) -> None:
    """Record programs, each in a process of its own, which begins after the imports."""
    # Native frames are named by the library that has them: debug information is not read.
    os.environ |= {"TORCH_DISABLE_ADDR2LINE": "1", "TORCH_SYMBOLIZE_MODE": "dladdr"}
    from benchmarks.layers.distributed import DISTRIBUTED
    from benchmarks.layers.odd import ODD
    from benchmarks.layers.programs import NEW, PROGRAMS
    from benchmarks.layers.recording import record
    from benchmarks.layers.unseen import UNSEEN

    every = PROGRAMS | NEW | UNSEEN | ODD | DISTRIBUTED
    for name in chosen or every:
        path = folder / f"{name}.pickle"
        _in_a_process(partial(record, every[name], path, "all"))
        print(name, "recorded" if path.exists() else "failed", flush=True)


def record_kineto(folder: Path, chosen: list[str]) -> None:
    """Profile programs with each set of flags, on the device that LAYERS_DEVICE names."""
    from benchmarks.layers.kineto_recording import FLAGS, PROFILED, record

    for name in chosen or PROFILED:
        for flags in FLAGS:
            _in_a_process(partial(record, PROFILED[name], name, flags, folder))
            is_there = (folder / f"{name}.{flags}.mem").exists()
            print(name, flags, "recorded" if is_there else "failed", flush=True)


def _in_a_process(run: Callable[[], None]) -> None:
    child = os.fork()
    if not child:
        try:
            run()
        except Exception:  # noqa: BLE001  # the child ends here, whatever failed
            traceback.print_exc()
        finally:
            os._exit(0)
    os.waitpid(child, 0)


def main(arguments: list[str]) -> None:
    what, folder, *chosen = arguments
    if what == "record":
        record(Path(folder), chosen)
    elif what == "record-kineto":
        record_kineto(Path(folder), chosen)
    elif what == "compare-kineto":
        from benchmarks.layers.kineto_comparison import compare as compare_kineto

        compare_kineto(Path(folder), chosen)
    else:
        from benchmarks.layers.comparison import compare

        compare(Path(folder), chosen)


if __name__ == "__main__":
    main(sys.argv[1:])
