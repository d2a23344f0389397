"""Runs every program with every recorder, each in a process of its own, and compares.

The processes are forked from servers that have imported all libraries, so that a run takes as long as its
program does, and so that two runs begin in the same state, down to the addresses of objects.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector

from tests.certificate import cpu_blocks
from tests.certificate.comparison import Difference, differences
from tests.certificate.cpu_blocks import preloaded_environment
from tests.certificate.programs import PROGRAMS
from tests.certificate.recorders import ALL_RECORDERS, UNDER_A_MODE
from tests.certificate.run import Record

ROOT = Path(__file__).parents[2]


CUDA = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # with which cuBLAS computes the same twice
LIBRARIES = ("transformers", "accelerate", "lightning")


def why_impossible() -> str:
    """Why the programs cannot be compared on this machine, "" if they can."""
    missing = [library for library in LIBRARIES if find_spec(library) is None]
    return cpu_blocks.why_impossible() or (f"not installed: {', '.join(missing)}" if missing else "")


@dataclass(frozen=True)
class Verdict:
    """A program and a recorder, compared with the program alone.

    Attributes:
        broken: differences in what is promised.
        by_design: differences in what is not.
        refused: why the recorder did not record, "" if it did.
        failed: why there is no comparison, "" if there is.
        raised: the error that ended the program without a recorder, "" if none did.
        messages: what tb_memplugin logged.
        peaks: the highest bytes of the CPU's blocks, without and with the recorder.
    """

    program: str
    recorder: str
    broken: tuple[Difference, ...] = ()
    by_design: tuple[Difference, ...] = ()
    refused: str = ""
    failed: str = ""
    raised: str = ""
    messages: tuple[str, ...] = ()
    peaks: tuple[int, int] = (0, 0)


Answer = list[Record | str]
"""A record, or what went wrong, for each rank."""


class Servers:
    """Processes that run programs, as many as there are cores. A context manager.

    With device "cuda", programs create their tensors on the GPU.
    """

    def __init__(self, count: int | None = None, device: str = "cpu") -> None:
        self._device = device
        self._count = count or len(os.sched_getaffinity(0))
        self._processes: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Servers:
        environment = {**preloaded_environment(), "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        environment |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment |= CUDA if self._device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
        environment |= {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # else it has as many threads as were busy
        command = [sys.executable, "-m", "tests.certificate.server", self._device]
        for _ in range(self._count):
            self._processes.append(
                subprocess.Popen(
                    command, cwd=ROOT, env=environment, text=True, bufsize=1,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                )
            )  # fmt: skip
        for process in self._processes:
            assert process.stdout is not None
            if process.stdout.readline() != "ready\n":
                raise RuntimeError("a server of the certificate could not start: see its error above")
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._processes:
            process.kill()  # its children end with it
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()
        self._processes.clear()

    def answers(self, runs: Iterable[tuple[str, str]]) -> Iterator[tuple[tuple[str, str], Answer]]:
        """Run (program, recorder) pairs and yield each with its answer, as they end."""
        pending = deque(runs)
        with tempfile.TemporaryDirectory(prefix="certificate-") as folder, DefaultSelector() as selector:
            busy: dict[int, tuple[str, str]] = {}

            def send(process: subprocess.Popen[str]) -> None:
                assert process.stdin is not None
                assert process.stdout is not None
                if not pending:
                    return
                busy[process.pid] = this = pending.popleft()
                work = tempfile.mkdtemp(dir=folder)
                process.stdin.write(json.dumps([*this, work]) + "\n")
                process.stdin.flush()
                if process.stdout not in (key.fileobj for key in selector.get_map().values()):
                    selector.register(process.stdout, EVENT_READ, process)

            for process in self._processes:
                send(process)
            while busy:
                for key, _ in selector.select():
                    process = key.data
                    line = process.stdout.readline()
                    if not line:
                        raise RuntimeError(f"a server ended while it ran {busy[process.pid]}")
                    this = busy.pop(process.pid)
                    answer = [_read(path) for path in json.loads(line)]
                    send(process)
                    yield this, answer


def _read(path: str) -> Record | str:
    if not Path(path).is_absolute():
        return path  # what went wrong
    record: Record = pickle.loads(Path(path).read_bytes())
    Path(path).unlink()
    return record


def pairs(programs: Sequence[str], recorders: Sequence[str]) -> list[tuple[str, str]]:
    """Return the (program, recorder) pairs to compare, in the order of the programs."""
    return [(program, name) for program in programs for name in recorders if _fits(program, name)]


def _fits(program: str, recorder: str) -> bool:
    chosen, ours = PROGRAMS[program], ALL_RECORDERS[recorder]
    return (chosen.stacks or not ours.stacks) and (chosen.has_trainer or not ours.in_trainers)


def certify(compared: Sequence[tuple[str, str]], servers: Servers) -> Iterator[Verdict]:
    """Run (program, recorder) pairs, and what each is compared with, and yield their verdicts."""
    runs = [
        (program, name) for program, recorder in compared for name in (ALL_RECORDERS[recorder].base, recorder)
    ]
    pending, answers = list(compared), dict[tuple[str, str], Answer]()
    for run, answer in servers.answers(dict.fromkeys(runs)):
        answers[run] = answer
        for program, recorder in [pair for pair in pending if pair[0] == run[0]]:
            base = answers.get((program, ALL_RECORDERS[recorder].base))
            if base is not None and (program, recorder) in answers:
                pending.remove((program, recorder))
                yield verdict(program, recorder, base, answers.pop((program, recorder)))
        if not any(program == run[0] for program, _ in pending):
            answers = {key: kept for key, kept in answers.items() if key[0] != run[0]}


_ENDED = "The training continues without it"
"""What tb_memplugin logs when an error of its own ends a recording (`record/guard.py`)."""


def verdict(program: str, recorder: str, base: Answer, recorded: Answer) -> Verdict:
    """Compare the runs of a program, rank by rank."""
    failed = next((answer for answer in (*base, *recorded) if isinstance(answer, str)), "")
    if failed:
        return Verdict(program, recorder, failed=failed)
    found: list[Difference] = []
    refused, raised, messages, peaks = "", "", [], (0, 0)
    for alone, ours in zip(base, recorded, strict=True):
        assert isinstance(alone, Record)
        assert isinstance(ours, Record)
        assert alone.blocks is not None
        assert ours.blocks is not None
        found += differences(alone, ours)
        refused = refused or ours.refused
        raised = raised or alone.raised
        messages += ours.messages
        found += [Difference("failures", 1, text) for text in ours.messages if _ENDED in text]
        peaks = max(peaks, (alone.blocks.peak, ours.blocks.peak))
    promised = ALL_RECORDERS[recorder].promised
    if promised == UNDER_A_MODE and PROGRAMS[program].kind == "compiled":  # what dynamo keeps differs, too
        promised -= {"process", "bits", "objects"} if PROGRAMS[program].differs_uncompiled else {"process"}
    promised |= {"failures"}
    broken = tuple(difference for difference in found if difference.kind in promised)
    by_design = tuple(difference for difference in found if difference.kind not in promised)
    return Verdict(program, recorder, broken, by_design, refused, "", raised, tuple(messages), peaks)
