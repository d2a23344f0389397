"""Estimate a program with PyTorch's own CUDA code: start it on the stand-in, and read what was recorded."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tb_memplugin.dryrun.build import stand_in
from tb_memplugin.dryrun.environment import environment
from tb_memplugin.dryrun.program import HISTORY, OUTCOME, REQUEST, Outcome, Request
from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.answer.estimation import allocated_levels, answer
from tb_memplugin.estimate.answer.estimator import WORKER
from tb_memplugin.estimate.answer.script import LIMIT_S, STEPS, Program
from tb_memplugin.estimate.answer.step_estimate import StepEstimate, highest
from tb_memplugin.estimate.answer.workload import Workload
from tb_memplugin.estimate.gpu_spec import GpuSpec
from tb_memplugin.loading import load
from tb_memplugin.simulator.allocator_settings import AllocatorSettings
from tb_memplugin.store.writer import RunWriter
from tb_memplugin.trace import MemoryTrace

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
        hints: values that only a real run knows.
        steps, limit_s: optimizer steps, and seconds, after which the program is ended.
        logdir: where to write the trace for the Memory tab; None for nowhere.

    Raises:
        MemPluginError: there is no CUDA build of PyTorch or no compiler, the program failed, or its process
            ended without an answer.
    """
    settings, built = AllocatorSettings.from_conf(conf), stand_in()
    with tempfile.TemporaryDirectory(prefix="tb_memplugin-dryrun-") as name:
        folder = Path(name)
        variables = environment(built, gpu, folder, unlimited=True)
        if conf:
            variables["PYTORCH_CUDA_ALLOC_CONF"] = conf
        outcome = _run(
            Request(asdict(program), steps, limit_s, dict(hints or {})), folder, variables, program.name
        )
        trace = _trace(folder / HISTORY, gpu)
    outcome.notes += _lost(trace, outcome)
    estimate = answer(trace, trace, settings, gpu, (), outcome.seconds, outcome.notes)
    estimate = replace(estimate, phases=highest(estimate.phases))
    notes = (f"{outcome.why}.", *estimate.notes, NOT_COUNTED)
    if logdir is not None:
        RunWriter(logdir, WORKER).write(trace)
    return StepEstimate(program.name, Workload(inference=not outcome.steps), gpu, estimate, notes)


def _lost(trace: MemoryTrace, outcome: Outcome) -> list[str]:
    """Return a note if the allocator counted a higher peak than its history has."""
    counted, recorded = max(outcome.allocated, default=0), int(allocated_levels(trace, 0).max())
    if counted <= recorded:
        return []
    return [f"The allocator counted a peak of {counted:,} bytes; its history, which is shown, lost a part."]


def _run(request: Request, folder: Path, variables: Mapping[str, str], name: str) -> Outcome:
    """Run a request in a process of its own, and return its outcome."""
    (folder / REQUEST).write_text(json.dumps(asdict(request)), "utf-8")
    words = [sys.executable, "-m", "tb_memplugin.dryrun.program", str(folder)]
    process = subprocess.Popen(words, env=dict(variables), stdout=2)
    try:
        with suppress(KeyboardInterrupt):  # the program has it, too, and ends
            process.wait(request.limit_s + START_S)
        process.wait(START_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        process.kill()
        process.wait()
    if not (folder / OUTCOME).is_file():
        raise MemPluginError(
            f"The program's process ended with status {process.returncode}, without an answer.",
            where=name,
            fix="What it printed last is above. Try --engine fake, which runs in this process.",
        )
    outcome = Outcome(**json.loads((folder / OUTCOME).read_text("utf-8")))
    if outcome.error is not None:
        raise MemPluginError(**outcome.error)
    return outcome


def _trace(history: Path, gpu: GpuSpec) -> MemoryTrace:
    """Return the trace of a history, which names the GPU."""
    if not history.is_file():
        raise MemPluginError(
            "The program put nothing on the GPU.",
            where=gpu.name,
            fix="Create the model and the inputs on the device 'cuda'.",
        )
    return load(history)
