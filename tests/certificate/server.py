"""A process that has imported everything, and forks a child for each run.

Start it by `python -m tests.certificate.server DEVICE`.
It reads one run a line from standard input, as JSON ([program, recorder, folder]), and answers one line: for
each rank the path of its pickled `Record`, or the text of what went wrong. All children end with it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import pickle
import random
import select
import signal
import sys
import traceback
import uuid
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

PR_SET_PDEATHSIG = 1
SECONDS = 120
"""The longest that a run may take."""


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def serve(device: str) -> None:
    """Answer until standard input ends."""
    end_with_parent()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    numbers = random.Random(0)
    uuid.uuid4 = lambda: uuid.UUID(
        int=numbers.getrandbits(128), version=4
    )  # dynamo and FSDP name things by it
    import torch

    from tests.certificate.process_state import WatchedNames
    from tests.certificate.programs import PROGRAMS, import_libraries

    torch.set_num_threads(1)
    with _without_gpu():
        import_libraries()
    names = WatchedNames()
    import gc

    gc.collect()
    gc.freeze()
    answers.write("ready\n")
    for line in sys.stdin:
        program, recorder, folder = json.loads(line)
        world = PROGRAMS[program].world
        children = [_start(program, recorder, Path(folder), rank, names, device) for rank in range(world)]
        answers.write(json.dumps([_end(*child) for child in children]) + "\n")


@contextmanager
def _without_gpu() -> Iterator[None]:
    """Hide the GPU from what is imported and compiled here: a process that has used it cannot be forked."""
    import torch

    hidden: list[AbstractContextManager[Any]] = [
        patch.object(torch.cuda, "is_available", lambda: False),
        patch.object(torch.cuda, "device_count", lambda: 0),
        patch.object(torch._C, "_ensureCUDADeviceGuardSet", lambda: None),  # it counts devices
        patch.object(torch.accelerator, "is_available", lambda: False),
        patch.object(torch.accelerator, "current_accelerator", lambda *_, **__: None),
    ]
    with ExitStack() as stack:
        for each in hidden:
            stack.enter_context(each)
        yield


def _start(program: str, recorder: str, folder: Path, rank: int, names, device: str) -> tuple[int, str]:
    path = folder / f"record-{rank}.pickle"
    child = os.fork()
    if not child:
        status = 1
        try:
            os.setpgid(0, 0)
            end_with_parent()
            _run(program, recorder, folder, rank, names, path, device)
            status = 0
        except BaseException:  # noqa: BLE001  # a forked child must not run the parent's code
            (folder / f"record-{rank}.error").write_text(traceback.format_exc())
        finally:
            os._exit(status)
    return child, str(path)


def _run(program: str, recorder: str, folder: Path, rank: int, names, path: Path, device: str) -> None:
    from tests.certificate.programs import PROGRAMS
    from tests.certificate.recorders import ALL_RECORDERS
    from tests.certificate.run import Run, run, work_on_gpu

    work = folder / f"work-{rank}"
    work.mkdir()
    os.chdir(work)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(work / "inductor")  # no run finds what another compiled
    output = os.open(folder / f"output-{rank}.txt", os.O_CREAT | os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()
    chosen = PROGRAMS[program]
    if device == "cuda":
        work_on_gpu()
    this = Run(ALL_RECORDERS[recorder], rank, chosen.world, str(folder / "meeting"), chosen.observed)
    record = run(chosen.run, this, names)
    sys.stdout.flush()
    path.write_bytes(pickle.dumps(record))


def _end(child: int, path: str) -> str:
    """Wait for a child and return its record's path, or what went wrong. Kill it when it takes too long."""
    descriptor = os.pidfd_open(child)
    ended, _, _ = select.select([descriptor], [], [], SECONDS)
    os.close(descriptor)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # and what it has left running
    _, status = os.waitpid(child, 0)
    if not ended:
        return f"it took longer than {SECONDS} seconds"
    error = Path(path).with_suffix(".error")
    if status:
        output = Path(path).with_name(Path(path).name.replace("record", "output")).with_suffix(".txt")
        return error.read_text() if error.exists() else f"status {status}: {output.read_text()}"
    return path


if __name__ == "__main__":
    serve(sys.argv[1])
