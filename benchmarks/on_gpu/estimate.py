"""The estimated peaks of twenty trainings, compared with those that the allocator counts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median

import torch
from torch import nn

from benchmarks.on_gpu.programs import LARGE, PROGRAMS, SMALL, Program, Size, clean
from tb_memplugin import MemoryEstimator, MemoryTracer
from tb_memplugin.estimate.gpu_spec import GpuSpec

MEDIAN, WORST = 1.0, 3.0
"""Goals: percent by which estimates may be off."""


def table(device: str) -> Iterator[str]:
    """Yield a row for each program; the row of a program that fails has the error."""
    size = LARGE if device == "cuda" else SMALL
    yield "| program | peak, allocated | estimated | off | reserved | estimated | off | seconds |"
    yield "|---|---|---|---|---|---|---|---|"
    misses: list[float] = []
    for program in PROGRAMS:
        try:
            yield _row(program, device, size, misses)
        except Exception as error:  # noqa: BLE001  # the other programs are still measured
            yield f"| {program} | {type(error).__name__}: {str(error).splitlines()[0][:120]} | | | | | | |"
    if misses:
        met = median(misses) <= MEDIAN and max(misses) <= WORST
        yield ""
        yield (
            f"Off by {median(misses):.2f} % in the median (goal {MEDIAN:g}), {max(misses):.2f} % at worst "
            f"(goal {WORST:g}), {len(misses)} programs: {'met' if met else 'not met'}."
        )


def _row(program: Program, device: str, size: Size, misses: list[float]) -> str:
    began = time.perf_counter()
    clean(device)
    with MemoryEstimator(device, gpu=_gpu(device)) as estimator:
        program.train(device, size)
    answer = estimator.estimate()
    seconds = time.perf_counter() - began
    clean(device)
    peak, reserved = _counted(program, size) if device == "cuda" else (_followed(program, size), 0)
    off = 100 * (answer.peak_allocated_bytes / peak - 1)
    misses.append(abs(off))
    cells = [f"{peak:,}", f"{answer.peak_allocated_bytes:,}", f"{off:+.2f} %"]
    if reserved:
        more = 100 * (answer.peak_reserved_bytes / reserved - 1)
        cells += [f"{reserved:,}", f"{answer.peak_reserved_bytes:,}", f"{more:+.2f} %"]
    else:
        cells += ["", "", ""]
    return f"| {program} | {' | '.join(cells)} | {seconds:.1f} |"


def _gpu(device: str) -> str | GpuSpec | None:
    """Return the present GPU's name or spec; for an unknown GPU, one of its generation; None for the CPU."""
    if device != "cuda":
        return None
    try:
        return GpuSpec.named(torch.cuda.get_device_name())
    except ValueError:
        return {8: "a100", 9: "h100", 10: "b200"}.get(torch.cuda.get_device_capability()[0], "a10")


def _counted(program: Program, size: Size) -> tuple[int, int]:
    """Return the allocator's peaks of a real run, allocated and reserved, including its own workspaces."""
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    program.train("cuda", size)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before[0], torch.cuda.max_memory_reserved() - before[1]


def _followed(program: Program, size: Size) -> int:
    """Return the peak of a run on the CPU, as MemoryTracer measures it."""
    tracer = MemoryTracer()
    with tracer.trace(nn.Identity()):
        program.train("cpu", size)
    trace = tracer.trace_result()
    return tracer.result.peak_allocated - int(trace.live(trace.device_row("cpu"))[0])
