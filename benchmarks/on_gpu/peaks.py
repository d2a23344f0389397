"""Peaks of profiled steps from our handler and from the allocator's counters, which must be equal."""

from __future__ import annotations

from collections.abc import Iterator

from tb_memplugin.analysis.moments import moment
from tb_memplugin.analysis.steps import StepStats, step_stats
from tb_memplugin.trace import MemoryTrace


def table(device: str) -> Iterator[str]:
    """Yield a row for each model and step."""
    yield "| model | step | peak_bytes | the counter's | equal | unknown at the peak |"
    yield "|---|---|---|---|---|---|"
    for name, trace, counted in _recorded() if device == "cuda" else _profiled():
        row = trace.device_row("cuda:0" if device == "cuda" else "cpu")
        for stats, peak in zip(step_stats(trace, row), counted, strict=True):
            ours = stats.peak_bytes if device == "cuda" else stats.window_peak_bytes
            yield (
                f"| {name} | {stats.step} | {ours:,} | {peak:,} | {'yes' if ours == peak else 'NO'} | "
                f"{_unknown(trace, row, stats):,} |"
            )


def _unknown(trace: MemoryTrace, device: int, stats: StepStats) -> int:
    parts = moment(trace, device, stats.peak_event).parts("category")
    return sum(part.bytes for part in parts if part.key == "unknown")


def _recorded() -> Iterator[tuple[str, MemoryTrace, list[int]]]:
    """Record on the GPU the cases that `tests/gpu/test_cuda_truth.py` checks."""
    from tests.gpu.test_cuda_truth import CASES, record

    for name, options in CASES:
        seen = record(name, **options)
        yield ", ".join([name, *options]), seen.traces[0], seen.peaks


def _profiled() -> Iterator[tuple[str, MemoryTrace, list[int]]]:
    """Profile on the CPU, whose counter starts with the profiler, so that the running sum is compared."""
    from tests.training import MODELS, train

    for name, build in MODELS.items():
        (cycle,) = train(build())
        base = cycle.reported[0][3] - cycle.reported[0][2]
        yield (
            name,
            cycle.trace,
            [
                max(total - base for time, _, _, total in cycle.reported if one.start_ns <= time < one.end_ns)
                for one in cycle.trace.steps
            ],
        )
