"""Run a program on both engines, and say where they differ: `tb-memplugin estimate --check`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from tb_memplugin.analysis.moments import peak
from tb_memplugin.dryrun.engine import estimate_program as on_cuda_code
from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate.answer.script import Program
from tb_memplugin.estimate.answer.step_estimate import StepEstimate
from tb_memplugin.estimate.answer.step_estimate import estimate_program as on_fake_tensors
from tb_memplugin.estimate.gpu_spec import GpuSpec
from tb_memplugin.loading import load
from tb_memplugin.trace import Phase

ENGINES: dict[str, Callable[..., StepEstimate]] = {"fake": on_fake_tensors, "runtime": on_cuda_code}
"""The engines, in the order in which they run and are shown."""

PHASES = tuple(phase.key for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER))
"""The phases that are compared, if both engines have them: call stacks tell no others."""

MOST = 20
"""How many modules and lines are named, those first that differ most."""


Kind = Literal["module", "line"]
KINDS: tuple[Kind, ...] = get_args(Kind)
"""By what the peaks are divided to be compared."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A figure of which the engines say different numbers of bytes.

    `kind` is "peak" (allocated or reserved), "phase", or "module" or "line" (allocated at the engine's own
    peak). Lines are those of the program, or of a library where none of the program's is on the stack.
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
    parts: dict[str, dict[Kind, dict[str, int]]] = {}
    with tempfile.TemporaryDirectory(prefix="tb_memplugin-check-") as folder:
        for engine, estimate in ENGINES.items():
            logdir = Path(folder) / engine
            try:
                steps[engine] = estimate(program, gpu, logdir=str(logdir), **options)
            except MemPluginError as error:
                errors[engine] = error
                continue
            parts[engine] = _parts_of_the_peak(logdir)
    if not steps:
        raise errors["fake"]
    differences = _differences(steps, parts) if len(steps) == len(ENGINES) else ()
    return Comparison(steps, errors, differences)


def _parts_of_the_peak(logdir: Path) -> dict[Kind, dict[str, int]]:
    """Return allocated bytes by module and by line, at the peak of the run that was written to a folder."""
    trace = load(logdir)
    at = peak(trace, device=trace.devices[0].name)
    return {kind: {part.key: part.bytes for part in at.parts(kind)} for kind in KINDS}


def _differences(
    steps: dict[str, StepEstimate], parts: dict[str, dict[Kind, dict[str, int]]]
) -> tuple[Difference, ...]:
    fake, runtime = (steps[engine].estimate for engine in ENGINES)
    phases = _of_names("phase", dict(fake.phases), dict(runtime.phases))
    figures = [
        Difference("peak", "allocated", fake.peak_allocated_bytes, runtime.peak_allocated_bytes),
        Difference("peak", "reserved", fake.peak_reserved_bytes, runtime.peak_reserved_bytes),
        *(row for row in phases if row.name in PHASES and row.fake_bytes and row.runtime_bytes),
    ]
    if fake.peak_allocated_bytes != runtime.peak_allocated_bytes:
        for kind in KINDS:
            rows = _of_names(kind, parts["fake"][kind], parts["runtime"][kind])
            rows.sort(key=lambda row: -abs(row.fake_bytes - row.runtime_bytes))
            figures += rows[:MOST]
    return tuple(figure for figure in figures if figure.fake_bytes != figure.runtime_bytes)


def _of_names(kind: str, fake: dict[str, int], runtime: dict[str, int]) -> list[Difference]:
    return [Difference(kind, name, fake.get(name, 0), runtime.get(name, 0)) for name in fake | runtime]
