"""`ranks`: all workers of a run side by side, step by step, whether recorded or watched by a monitor."""

from __future__ import annotations

from typing import Literal, TypedDict, get_args

import numpy as np

from tb_memplugin.analysis.ranks import MISSING, RankPeak, RankSteps, rank_columns, rank_peaks
from tb_memplugin.errors import NotRecordedError
from tb_memplugin.server.selection import MOST_COLUMNS, Request
from tb_memplugin.server.session import Session
from tb_memplugin.server.shapes import RankBytes, shape_of
from tb_memplugin.store.worker_steps import WorkerSteps, device_kind, without_dumps
from tb_memplugin.trace.tables import Int64

DEFAULT_COLUMNS = 500
MOST_CELLS = 150_000
"""The most cells in an answer, which then has about 2 MB."""

Measure = Literal["allocated", "reserved"]
MEASURES: tuple[Measure, ...] = get_args(Measure)


class MedianRank(RankBytes):
    """The rank in the middle of all that have the step of the highest, the lower one of two."""

    recorded: bool
    """Whether that step is recorded in full."""


class Rank(TypedDict):
    """A device of a worker. Figures over all its steps are whatever `first` and `last` are."""

    worker: str
    device: str
    """Which it is."""
    capacity_bytes: int | None
    """The memory of the device."""
    count: int
    """How many steps it has."""
    highest_bytes: int
    highest_step: int
    lowest_bytes: int
    lowest_step: int
    """Over all its steps."""
    at_least: bool
    """Whether the highest may have been higher."""
    recorded: bool
    """Whether the step of the highest is recorded in full."""
    median: MedianRank | None
    """Null if no other rank has the step of the highest."""
    bytes: list[int | None]
    """For each column, its highest; null: no step there."""
    steps: list[int | None] | None
    """For each column, the first step that has it; null if every column is one step."""


class RanksAnswer(TypedDict):
    """All workers of a run side by side."""

    of: Measure
    offered: list[Measure]
    """The measure of this answer, and all that there are."""
    count: int
    """Steps in all columns, of whichever rank."""
    first: list[int]
    last: list[int]
    """The first and last step of each column."""
    rows: list[Rank]
    """In the order of the numbers in their names (rank2 before rank10)."""


def answer(session: Session, request: Request) -> RanksAnswer:
    """Answer from the metadata of recorded steps and the monitors' records; no side file is read."""
    every = _ranks(session, request)
    offered = [name for name in MEASURES if any((getattr(rank, name) != MISSING).any() for rank in every)]
    wanted = request.text("of", offered[0])
    of = next((name for name in offered if name == wanted), offered[0])
    shown = [rank for rank in every if (getattr(rank, of) != MISSING).any()]
    ranks = [_steps_with(rank, of) for rank in shown]
    drawn = rank_columns(
        ranks,
        request.number("first") if request.has("first") else None,
        request.number("last") if request.has("last") else None,
        min(request.number("px", DEFAULT_COLUMNS, 1, MOST_COLUMNS), max(1, MOST_CELLS // len(ranks))),
    )
    single = len(drawn.first) == drawn.count  # then the step of every cell is that of its column
    columns = zip(shown, rank_peaks(ranks), drawn.high, drawn.high_step, strict=True)
    rows = [
        _shape(rank, peak, shown, of, _values(high), None if single else _values(step))
        for rank, peak, high, step in columns
    ]
    return {
        "of": of,
        "offered": offered,
        "count": drawn.count,
        "first": drawn.first.tolist(),
        "last": drawn.last.tolist(),
        "rows": rows,
    }


_Column = list[int | None]


def _ranks(session: Session, request: Request) -> list[WorkerSteps]:
    """Return the devices of the requested type (`cuda` for cuda:3) of all workers, rank2 before rank10."""
    run, kind = request.text("run"), device_kind(request.text("device"))
    for fresh in (False, True):
        of_run = session.worker_steps(request, run, fresh=fresh).get(run, [])
        ranks = [rank for rank in without_dumps(of_run) if device_kind(rank.device) == kind]
        if ranks:
            return ranks
    raise NotRecordedError(
        f"Run {run!r} has no worker with a device of this kind.",
        where="run, device",
        fix="Take both from the runs route.",
    )


def _steps_with(rank: WorkerSteps, of: str) -> RankSteps:
    values = getattr(rank, of)
    present = values != MISSING
    return RankSteps(rank.steps[present], values[present])


def _shape(
    rank: WorkerSteps,
    peak: RankPeak,
    ranks: list[WorkerSteps],
    of: Measure,
    high: _Column,
    steps: _Column | None,
) -> Rank:
    row = int(np.searchsorted(rank.steps, peak.highest_step))
    median = None
    if peak.median_rank is not None and peak.median_bytes is not None:
        other = ranks[peak.median_rank]
        recorded = bool(other.recorded[np.searchsorted(other.steps, peak.highest_step)])
        median = shape_of(MedianRank, other, bytes=peak.median_bytes, recorded=recorded)
    return shape_of(
        Rank,
        peak,
        worker=rank.worker,
        device=rank.device,
        count=rank.step_count,
        capacity_bytes=rank.capacity,
        at_least=of == "allocated" and bool(rank.at_least[row]),
        recorded=bool(rank.recorded[row]),
        median=median,
        bytes=high,
        steps=steps,
    )


def _values(row: Int64) -> _Column:
    if (row == MISSING).any():
        return [None if value == MISSING else value for value in row.tolist()]
    return row.tolist()  # type: ignore[no-any-return]
