"""A logdir as people have it: real trainings of the demo's transformer, recorded under torch.profiler."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from examples.demo import Config, Transformer, batches, standard_library
from tb_memplugin import memory_trace_handler
from tb_memplugin.analysis.divisions import By
from tb_memplugin.analysis.moments import Moment, moment
from tb_memplugin.analysis.steps import StepStats, step_stats
from tb_memplugin.store.reader import load_window, read_recordings
from tb_memplugin.trace import MemoryTrace

BASELINE = Config("baseline", batch=4, context=128)
LENGTHS = (128, 112, 128, 96, 112, 104, 120)
"""Tokens in each step's batch, as when batches are made by length: step 2 peaks highest, then step 6."""

STEPS = [2, 3, 5, 6]
"""The recorded ones: two windows of two."""


def record_runs(logdir: Path) -> None:
    """Record `checkpointed`, which recomputes activations, then `baseline`, on whose rank0 the tab opens."""
    text = standard_library()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # models this small only get slower when threads wait for one another
    try:
        record(logdir / "checkpointed", "rank0", replace(BASELINE, recompute=True), text)
        record(logdir / "baseline", "rank0", BASELINE, text)
        record(logdir / "baseline", "rank1", replace(BASELINE, batch=2), text)
    finally:
        torch.set_num_threads(threads)


def record(run: Path, worker: str, config: Config, text: torch.Tensor) -> None:
    torch.manual_seed(0)
    model = Transformer(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(skip_first=1, wait=0, warmup=1, active=2, repeat=2),
        profile_memory=True,
        on_trace_ready=memory_trace_handler(run, worker, model=model, optimizer=optimizer),
    ) as profiler:
        for length, (tokens, targets) in zip(LENGTHS, batches(text, config), strict=False):
            loss = model(tokens[:, :length], targets[:, :length])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()


@dataclass(frozen=True)
class Recorded:
    """What the page should show of one step, from its side file by the analysis alone: no server between."""

    trace: MemoryTrace
    step: int
    epoch_ns: int
    side_file: str

    @property
    def stats(self) -> StepStats:
        return step_stats(self.trace, 0)[self.trace.step_row(self.step)]

    def state(self, event: int | None = None) -> Moment:
        """After an event, by default at the step's peak."""
        return moment(self.trace, 0, self.stats.peak_event if event is None else event)

    def parts(self, by: By, event: int | None = None) -> dict[str, int]:
        return {part.key: part.bytes for part in self.state(event).parts(by)}


@lru_cache(maxsize=32)
def recorded(logdir: Path, run: str = "baseline", worker: str = "rank0", step: int = 2) -> Recorded:
    (found,) = (one for one in read_recordings(str(logdir / run / worker)).steps if one.metadata.step == step)
    assert found.side_file is not None
    return Recorded(load_window(found.side_file), step, found.metadata.epoch_ns, found.side_file)
