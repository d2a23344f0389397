"""Estimate a program with PyTorch's own CUDA code: start it on the stand-in, and read what was recorded."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from tb_memplugin.analysis.moments import peak
from tb_memplugin.dryrun.build import StandIn, stand_in, values_library
from tb_memplugin.dryrun.program import HISTORY, OUTCOME, REQUEST, Outcome, Request
from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.answer.estimation import allocated_levels, answer
from tb_memplugin.estimate.answer.estimator import WORKER
from tb_memplugin.estimate.answer.script import LIMIT_S, STEPS, Program
from tb_memplugin.estimate.answer.step_estimate import StepEstimate, highest
from tb_memplugin.estimate.answer.step_estimate import estimate_program as on_fake_tensors
from tb_memplugin.estimate.answer.workload import Workload
from tb_memplugin.estimate.gpu_spec import GpuSpec
from tb_memplugin.estimate.libraries.cudnn.questions import described
from tb_memplugin.loading import load
from tb_memplugin.simulator.allocator_settings import AllocatorSettings
from tb_memplugin.store.writer import RunWriter
from tb_memplugin.temporary import new_folder
from tb_memplugin.trace import MemoryTrace, Phase

START_S = 120
"""Seconds that a process may take beyond the program's limit: to import torch, and to write its history."""

NOT_COUNTED = "Not counted: what cuBLAS and NCCL allocate by themselves, outside PyTorch's allocator."


def estimate_program(
    program: Program,
    gpu: GpuSpec,
    *,
    conf: str = "",
    hints: Mapping[str, Any] | None = None,
    steps: int = STEPS,
    limit_s: int = LIMIT_S,
    logdir: str | None = None,
) -> StepEstimate:
    """Run a program on PyTorch's CUDA code and allocator, unchanged, and return its memory.

    Args:
        program: what to run; what it prints goes to standard error.
        gpu: the GPU that the program sees. Requests beyond its memory succeed: the answer is the need.
        conf: settings of the allocator, as in PYTORCH_CUDA_ALLOC_CONF.
        steps, limit_s: optimizer steps, and seconds, after which the program is ended.
        logdir: where to write the trace for the Memory tab; None for nowhere.

    Raises:
        MemPluginError: there is no CUDA build of PyTorch or no compiler, the program failed, or its process
            ended without an answer.
    """
    settings, built = AllocatorSettings.from_conf(conf), stand_in()
    values_library()  # compiled before the time of the program begins
    ran: list[tuple[StepEstimate, MemoryTrace]] = []
    with new_folder() as name:
        variables = environment(built, gpu, Path(name), devices=program.ranks_per_node, unlimited=True)
        variables |= {"MASTER_PORT": str(_free_port())} if (program.ranks or 1) > 1 else {}
        variables |= {"PYTORCH_CUDA_ALLOC_CONF": conf} if conf else {}
        folders = [Path(name) / f"rank{rank}" for rank in range(program.ranks or 1)]
        for rank, folder in enumerate(folders):
            folder.mkdir()
            request = Request(asdict(program), steps, limit_s, dict(hints or {}), rank)
            (folder / REQUEST).write_text(json.dumps(asdict(request)), "utf-8")
        _run(folders, variables, limit_s)
        for folder in folders:
            outcome = _outcome(folder, program.name)
            if ranks := outcome.starts_ranks:
                program = replace(program, ranks=ranks, ranks_per_node=ranks)
                options: dict[str, Any] = {"conf": conf, "hints": hints, "steps": steps, "limit_s": limit_s}
                return estimate_program(program, gpu, logdir=logdir, **options)
            trace = _trace(folder / HISTORY, gpu)
            outcome.notes += _lost(trace, outcome)
            estimate = answer(trace, trace, settings, gpu, (), outcome.seconds, outcome.notes)
            estimate = replace(estimate, phases=highest(estimate.phases))
            notes = (f"{outcome.why}.", *estimate.notes, NOT_COUNTED)
            workload = Workload(inference=not outcome.steps)
            ran.append((StepEstimate(program.name, workload, gpu, estimate, notes), trace))
    if logdir is not None:
        for rank, (_, trace) in enumerate(ran):
            RunWriter(logdir, WORKER if len(ran) == 1 else f"{WORKER}_rank{rank}").write(trace)
    worst = max(range(len(ran)), key=lambda rank: (ran[rank][0].estimate.peak_reserved_bytes, -rank))
    step = ran[worst][0]
    if len(ran) == 1:
        return step
    return replace(step, notes=(f"Rank {worst} reserves the most of {len(ran)} ranks.", *step.notes))


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def _run(folders: Sequence[Path], variables: Mapping[str, str], limit_s: int) -> None:
    """Run the request in each folder in a process of its own, all at once; none is left running."""
    words = [sys.executable, "-m", "tb_memplugin.dryrun.program"]
    ranks = [subprocess.Popen([*words, str(folder)], env=dict(variables), stdout=2) for folder in folders]
    end = monotonic() + limit_s + START_S
    try:
        with suppress(KeyboardInterrupt):  # the programs have it, too, and end
            _wait(ranks, end)
        _wait(ranks, min(end, monotonic() + START_S))
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def _wait(ranks: Sequence[subprocess.Popen[bytes]], end: float) -> None:
    """Wait until every process has ended, one has failed, or the time is over."""
    while monotonic() < end and any(rank.poll() is None for rank in ranks):
        if any(rank.poll() for rank in ranks):
            return
        sleep(0.05)


def _outcome(folder: Path, name: str) -> Outcome:
    """Return how a program went."""
    if not (folder / OUTCOME).is_file():
        raise MemPluginError(
            "The program's process ended without an answer.",
            where=name,
            fix="What it printed last is above. Try --engine fake, which runs in this process.",
        )
    outcome = Outcome(**json.loads((folder / OUTCOME).read_text("utf-8")))
    if outcome.error is not None:
        raise MemPluginError(**outcome.error)
    return outcome


def _lost(trace: MemoryTrace, outcome: Outcome) -> list[str]:
    """Return a note if the allocator counted a higher peak than its history has."""
    counted, recorded = max(outcome.allocated, default=0), int(allocated_levels(trace, 0).max())
    if counted <= recorded:
        return []
    return [f"The allocator counted a peak of {counted:,} bytes; its history, which is shown, lost a part."]


def _trace(history: Path, gpu: GpuSpec) -> MemoryTrace:
    """Return the trace of a history, which names the GPU."""
    if not history.is_file():
        raise MemPluginError(
            "The program put nothing on the GPU.",
            where=gpu.name,
            fix="Create the model and the inputs on the device 'cuda'.",
        )
    return load(history)


def environment(
    built: StandIn,
    gpu: GpuSpec,
    folder: Path,
    *,
    devices: int = 1,
    unlimited: bool = False,
    asks_cudnn: bool = True,
) -> dict[str, str]:
    """Return the variables of a process for which `devices` GPUs of one kind are there.

    Args:
        folder: where processes of several ranks leave messages for each other.
        asks_cudnn: whether the installed cuDNN chooses kernels and sizes workspaces; else they are 0.
    """
    earlier = os.environ.get("LD_LIBRARY_PATH", "")
    return {
        **os.environ,
        "LD_PRELOAD": str(built.preloaded),
        "LD_LIBRARY_PATH": os.pathsep.join([str(built.libraries), *([earlier] if earlier else [])]),
        "STANDIN_DEVICE": _device(gpu),
        "STANDIN_CUDNN_DEVICE": described(gpu),
        "STANDIN_CUDNN_WORKSPACES": str(int(asks_cudnn)),
        "STANDIN_DEVICES": str(devices),
        "STANDIN_UNLIMITED": str(int(unlimited)),
        "STANDIN_FOLDER": str(folder),
    }


def _device(gpu: GpuSpec) -> str:
    """Return a GPU as `target` of cudart.cpp reads it."""
    major, minor = gpu.compute_capability
    numbers = (major, minor, gpu.processors, gpu.threads, gpu.blocks, gpu.shared_bytes, gpu.memory_bytes)
    return f"{' '.join(map(str, numbers))} {gpu.driver_name}"


ENGINES: dict[str, Callable[..., StepEstimate]] = {"fake": on_fake_tensors, "runtime": estimate_program}
"""The engines, in the order in which they run and are shown."""

PHASES = tuple(phase.key for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER))
"""The phases that are compared, if both engines have them: call stacks tell no others."""

MOST = 20
"""How many lines are named, those first that differ most."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A figure of which the engines say different numbers of bytes.

    `kind` is "peak" (allocated or reserved), "phase", or "line" (allocated at the engine's own peak). Lines
    are those of the program, or of a library where none of the program's is on the stack.
    """

    kind: str
    name: str
    fake_bytes: int
    runtime_bytes: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """What both engines say of a program. An engine that could not run it has an error and no step."""

    steps: dict[str, StepEstimate]
    errors: dict[str, MemPluginError]
    differences: tuple[Difference, ...]


def compare_engines(program: Program, gpu: GpuSpec, **options: Any) -> Comparison:
    """Run a program on each engine, and compare what they say.

    Args:
        options: the further arguments of `estimate_program`, without `logdir`.

    Raises:
        MemPluginError: no engine could run it; the error is that of fake tensors.
    """
    steps: dict[str, StepEstimate] = {}
    errors: dict[str, MemPluginError] = {}
    lines: dict[str, dict[str, int]] = {}
    with new_folder() as folder:
        for engine, estimate in ENGINES.items():
            logdir = Path(folder) / engine
            try:
                steps[engine] = estimate(program, gpu, logdir=str(logdir), **options)
            except MemPluginError as error:
                errors[engine] = error
                continue
            lines[engine] = _lines_of_the_peak(logdir)
    if not steps:
        raise errors["fake"]
    differences = _differences(steps, lines) if len(steps) == len(ENGINES) else ()
    return Comparison(steps, errors, differences)


def _lines_of_the_peak(logdir: Path) -> dict[str, int]:
    """Return allocated bytes by line, at the peak of the run that was written to a folder."""
    trace = load(logdir)
    return {part.key: part.bytes for part in peak(trace, device=trace.devices[0].name).parts("line")}


def _differences(steps: dict[str, StepEstimate], lines: dict[str, dict[str, int]]) -> tuple[Difference, ...]:
    fake, runtime = (steps[engine].estimate for engine in ENGINES)
    phases = _of_names("phase", dict(fake.phases), dict(runtime.phases))
    figures = [
        Difference("peak", "allocated", fake.peak_allocated_bytes, runtime.peak_allocated_bytes),
        Difference("peak", "reserved", fake.peak_reserved_bytes, runtime.peak_reserved_bytes),
        *(row for row in phases if row.name in PHASES and row.fake_bytes and row.runtime_bytes),
    ]
    if fake.peak_allocated_bytes != runtime.peak_allocated_bytes:
        rows = _of_names("line", lines["fake"], lines["runtime"])
        figures += sorted(rows, key=lambda row: -abs(row.fake_bytes - row.runtime_bytes))[:MOST]
    return tuple(figure for figure in figures if figure.fake_bytes != figure.runtime_bytes)


def _of_names(kind: str, fake: dict[str, int], runtime: dict[str, int]) -> list[Difference]:
    return [Difference(kind, name, fake.get(name, 0), runtime.get(name, 0)) for name in fake | runtime]
