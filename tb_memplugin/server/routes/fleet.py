"""`fleet`: all runs side by side, each by its rank that peaks highest, and why runs ran out of memory."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TypedDict

import numpy as np

from tb_memplugin.analysis.ranks import RankSteps, rank_peaks
from tb_memplugin.analysis.steps import step_columns
from tb_memplugin.server.rule_search import first_matches
from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Session
from tb_memplugin.server.shapes import RankBytes, shape_of
from tb_memplugin.store.worker_steps import WorkerSteps, device_kind, in_order, without_dumps

CURVE_COLUMNS = 48
FULL = 1_000

OF_THE_HOST = {"cpu": 1, "shared": 1, "process": 2}
"""The kinds of memory that are none of an accelerator's; those of a higher number stand for a run last."""


class RunFailed(TypedDict):
    """The requests for memory that failed in a run, and the last of them."""

    count: int
    """How many, on all ranks."""
    worker: str
    device: str
    step: int
    """Where the last one was."""
    requested_bytes: int | None
    line: str | None
    """Its bytes and the source line that asked for them; null if only the number is known, or no stack."""


class ProcessPeak(TypedDict):
    """A process, by its resident memory."""

    worker: str
    step: int
    """Whose it is, and the first step in which it was highest."""
    bytes: int
    """What it was then."""


class FleetRun(TypedDict):
    """A run. Its figures are of the rank that peaks highest: of accelerators, where any were recorded."""

    run: str
    """Its name."""
    ranks: int
    """How many devices of the same kind it has, on all workers."""
    worker: str
    device: str
    step: int
    """The rank that peaks highest, and the first step that has the peak."""
    peak_bytes: int
    """The peak."""
    at_least: bool
    """Whether it may have been higher."""
    capacity_bytes: int | None
    """The memory of the device."""
    process: ProcessPeak | None
    """The highest process of its workers; it also holds what is no tensor. Null if none was watched."""
    median: RankBytes | None
    """The rank in the middle of all that have the step, the lower one of two. Null if no other has it."""
    growth_bytes: int | None
    """By how many bytes per step memory rises on the rank where it rises most; 0 if on none, null if none has
    enough steps to tell."""
    growing: RankBytes | None
    """The rank that grows most, and by how many bytes per step what is left after a step rises, by the rules
    of [Advice](advice.md)."""
    failed: RunFailed | None
    """Null if no request failed, or that was not recorded."""
    failed_known: bool
    """Whether failed requests were recorded on any rank. Those of the host's memory never are."""
    steps: int
    first: int
    last: int
    """How many steps the highest rank has, and the first and last of them."""
    curve: list[int]
    """The highest of its peaks in each of at most 48 columns of steps, in thousandths of the peak."""


class FleetAnswer(TypedDict):
    """All runs."""

    runs: list[FleetRun]
    """Those that were asked for, in order of their names."""
    count: int
    """How many runs with memory there are."""


def answer(session: Session, request: Request) -> FleetAnswer:
    """Answer from the metadata of recorded steps and the monitors' records; no side file is read."""
    ranks = session.worker_steps(request)
    wanted = request.text("run", "")
    rows = [_row(run, ranks[run]) for run in sorted(ranks, key=in_order) if wanted in ("", run)]
    if request.has("pattern"):
        rows = _matching(request.text("pattern"), "pattern", rows, [_texts(row) for row in rows])
    if request.has("filter"):
        rows = _matching(
            request.text("filter"), "filter", rows, [_folders(ranks[row["run"]], row) for row in rows]
        )
    return {"runs": rows, "count": len(ranks)}


def _row(run: str, every: Sequence[WorkerSteps]) -> FleetRun:
    of_kind = _of_one_kind(every)
    ranks = without_dumps(of_kind)
    rank = max(of_kind, key=lambda rank: (int(rank.allocated.max()), rank.dump_of != ""))
    compared = ranks if rank in ranks else [rank]
    peaks = rank_peaks([RankSteps(other.steps, other.allocated) for other in compared])
    peak = peaks[compared.index(rank)]
    growths = [rank.growth for rank in ranks if rank.growth is not None]
    growing = max(ranks, key=lambda rank: rank.growth or 0)
    median: RankBytes | None = None
    if peak.median_rank is not None and peak.median_bytes is not None:
        other = compared[peak.median_rank]
        median = shape_of(RankBytes, other, bytes=peak.median_bytes)
    return {
        "run": run,
        "ranks": len(ranks),
        "worker": rank.worker,
        "device": rank.device,
        "step": peak.highest_step,
        "peak_bytes": peak.highest_bytes,
        "at_least": bool(rank.at_least[np.searchsorted(rank.steps, peak.highest_step)]),
        "capacity_bytes": rank.capacity,
        "process": _process(every),
        "median": median,
        "growth_bytes": max(growths, default=None),
        "growing": shape_of(RankBytes, growing, bytes=growing.growth) if growing.growth else None,
        "failed": _failed(every),
        "failed_known": any(
            rank.failed is not None and device_kind(rank.device) not in OF_THE_HOST for rank in every
        ),
        "steps": rank.step_count,
        "first": int(rank.steps[0]),
        "last": int(rank.steps[-1]),
        "curve": _curve(rank),
    }


def _of_one_kind(ranks: Sequence[WorkerSteps]) -> list[WorkerSteps]:
    """Return the devices of the kind that peaks highest: accelerators, else the host, else the process."""

    def key(rank: WorkerSteps) -> tuple[int, int]:
        return OF_THE_HOST.get(device_kind(rank.device), 0), -int(rank.allocated.max())

    kind = device_kind(min(ranks, key=key).device)
    return [rank for rank in ranks if device_kind(rank.device) == kind]


def _process(every: Sequence[WorkerSteps]) -> ProcessPeak | None:
    processes = [rank for rank in every if rank.device == "process"]
    if not processes:
        return None
    rank = max(processes, key=lambda rank: int(rank.allocated.max()))
    row = int(rank.allocated.argmax())
    return {"worker": rank.worker, "step": int(rank.steps[row]), "bytes": int(rank.allocated[row])}


def _curve(rank: WorkerSteps) -> list[int]:
    starts, _ = step_columns(len(rank.steps), CURVE_COLUMNS)
    high = np.maximum.reduceat(rank.allocated, starts)
    columns: list[int] = (high * FULL // max(1, int(high.max()))).tolist()
    return columns


def _failed(ranks: Iterable[WorkerSteps]) -> RunFailed | None:
    with_failures = [(rank, rank.failed) for rank in ranks if rank.failed is not None and rank.failed.count]
    if not with_failures:
        return None
    # A recording that says what failed comes before a monitor, which only counts: its line, else its bytes.
    rank, last = max(
        with_failures,
        key=lambda row: (row[1].line is not None, row[1].requested_bytes is not None, row[1].step or 0),
    )
    count = sum(failed.count for _, failed in with_failures)
    return shape_of(RunFailed, last, count=count, worker=rank.worker, device=rank.device, step=last.step or 0)


def _texts(row: FleetRun) -> list[str]:
    line = row["failed"] and row["failed"]["line"]
    return [row["run"], row["worker"], *([line] if line else [])]


def _folders(ranks: Sequence[WorkerSteps], row: FleetRun) -> list[str]:
    """Return what TensorBoard calls the workers of a run."""
    return list(dict.fromkeys(f"{row['run']}/{rank.worker}" for rank in ranks))


def _matching(
    pattern: str, name: str, rows: list[FleetRun], texts: Sequence[Sequence[str]]
) -> list[FleetRun]:
    """Return the rows of which a text matches a pattern, ignoring case, as in TensorBoard's own filters.

    Raises:
        MemPluginError: the pattern is invalid, or the search takes too long.
    """
    first = first_matches([pattern], texts, name, [repr(pattern[:80])], re.IGNORECASE)
    return [row for row, match in zip(rows, first, strict=True) if match == 0]
