"""The oracle: torch.profiler alone, used as its documentation says, and what it counts in each step.

Compared are windows that begin with the training: of a block that is alive before a window and freed in
it, the CPU's counters take off nothing, or the size of an earlier block at its address.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, schedule

from tb_memplugin.store.reader import RecordedStep, read_recordings
from tests.training import reported_events


class PlainProfiler:
    """Profiles the first steps; `peaks` are the highest running sums of its counters, by step."""

    def __init__(self, steps: int) -> None:
        self.peaks: dict[int, int] = {}
        self.profile = profile(
            activities=[ProfilerActivity.CPU],
            schedule=schedule(wait=0, warmup=0, active=steps, repeat=1),
            profile_memory=True,
            on_trace_ready=self._count,
        )

    def _count(self, prof: profile) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            prof.export_chrome_trace(str(path))
            memory, chrome = reported_events(path)
        base = memory[0][3] - memory[0][2]
        for name, begin, end in _steps(chrome):
            inside = [total for time, _, _, total in memory if begin <= time < end]
            self.peaks[name] = max(inside) - base


def _steps(chrome) -> list[tuple[int, int, int]]:
    """(number, begin, end) in epoch nanoseconds of every `ProfilerStep#N`."""
    base = chrome["baseTimeNanoseconds"]
    spans = [
        (int(event["name"].partition("#")[2]), round(event["ts"] * 1000), round(event["dur"] * 1000))
        for event in chrome["traceEvents"]
        if event.get("name", "").startswith("ProfilerStep#") and event.get("ph") == "X"
    ]
    return [(number, base + start, base + start + length) for number, start, length in spans]


def recorded(folder) -> tuple[RecordedStep, ...]:
    """The steps in a logdir, which must be readable."""
    found = read_recordings(str(folder))
    assert found.problems == ()
    return found.steps


def steps_in(folder) -> list[int]:
    return [step.metadata.step for step in recorded(folder)]


def stats_in(folder) -> dict:
    """Step -> its numbers on the CPU."""
    return {step.metadata.step: step.summary().devices[0].stats for step in recorded(folder)}


def counted_peaks(folder) -> dict[int, int]:
    """What `PlainProfiler.peaks` says, from a recording: highest running sum since its window began."""
    return {step: stats.window_peak_bytes for step, stats in stats_in(folder).items()}
