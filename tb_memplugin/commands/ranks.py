"""`tb-memplugin ranks`: the workers of a run side by side, the highest first."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import click

from tb_memplugin.analysis.ranks import RankPeak, RankSteps, rank_peaks
from tb_memplugin.analysis.units import size_text
from tb_memplugin.commands.opening import recordings_below
from tb_memplugin.commands.options import PATH, json_option
from tb_memplugin.commands.tables import NOT_KNOWN, Unit, show_table
from tb_memplugin.errors import NotRecordedError
from tb_memplugin.proto.recording_pb2 import StepMetadata
from tb_memplugin.store.reader import Recordings
from tb_memplugin.store.worker_steps import WorkerSteps, device_kind, in_order, without_dumps, worker_steps

_Row = tuple[WorkerSteps, RankPeak, list[WorkerSteps]]


@click.command("ranks")
@click.argument("path", type=PATH)
@click.option(
    "--top", type=click.IntRange(min=0), default=20, show_default=True, help="Number of rows; 0: all."
)
@json_option("Print JSON, with sizes in bytes.")
def command(path: str, top: int, as_json: bool) -> None:
    """Which worker of the run in the folder PATH peaks highest, in which step, and how far from the others.

    The median is the rank in the middle of all that have that step, on devices of the same type. Growth is
    by how much what is left after a step rises, as Advice judges it.
    """
    ranks = rank_steps(recordings_below(path))
    if not ranks:
        raise NotRecordedError("This folder has no recording.", where=path, fix="Give a run's folder.")
    rows = sorted(_rows(ranks), key=lambda row: -row[1].highest_bytes)[: top or None]
    if as_json:
        click.echo(json.dumps({"source": path, "ranks": [_json(*row) for row in rows]}, indent=2))
        return
    unit = Unit.for_bytes([rows[0][1].highest_bytes])
    cells = [_cells(*row, unit) for row in rows]
    heads = ("rank", "device", f"peak {unit.name}", "in step", "above the median", "growth per step", "steps")
    show_table(heads, cells)
    if len(rows) < len(ranks):
        click.echo(f"{len(rows):,} of {len(ranks):,} ranks; --top 0 shows all.")


def rank_steps(recordings: Recordings) -> list[WorkerSteps]:
    """Return the steps of each worker on each of its devices: recorded, else the monitor's figures."""
    recorded: dict[str, list[StepMetadata]] = {}
    for step in recordings.steps:
        recorded.setdefault(step.metadata.worker, []).append(step.metadata)
    watched = {series.worker: series.figures for series in recordings.watched}
    workers = sorted({**recorded, **watched}, key=in_order)
    return without_dumps(
        [
            rank
            for worker in workers
            for rank in worker_steps(worker, recorded.get(worker, []), watched.get(worker))
        ]
    )


def _rows(ranks: Sequence[WorkerSteps]) -> Iterator[_Row]:
    """Yield each rank, its peak, and the ranks it is compared with: those on devices of the same type."""
    for kind in dict.fromkeys(device_kind(rank.device) for rank in ranks):
        alike = [rank for rank in ranks if device_kind(rank.device) == kind]
        peaks = rank_peaks([RankSteps(rank.steps, rank.allocated) for rank in alike])
        yield from ((rank, peak, alike) for rank, peak in zip(alike, peaks, strict=True))


def _cells(rank: WorkerSteps, peak: RankPeak, alike: Sequence[WorkerSteps], unit: Unit) -> tuple[str, ...]:
    above = NOT_KNOWN
    if peak.median_rank is not None and peak.median_bytes:
        share = 100 * (peak.highest_bytes - peak.median_bytes) / peak.median_bytes
        median = alike[peak.median_rank]
        name = median.worker if len({other.worker for other in alike}) > 1 else median.device
        above = f"{round(share, 1) + 0.0:+.1f} % ({name})"  # no -0.0
    growth = NOT_KNOWN if rank.growth is None else "none" if rank.growth == 0 else size_text(rank.growth)
    highest = unit.show(peak.highest_bytes)
    return (rank.worker, rank.device, highest, str(peak.highest_step), above, growth, f"{rank.step_count:,}")


def _json(rank: WorkerSteps, peak: RankPeak, alike: Sequence[WorkerSteps]) -> dict[str, Any]:
    median = None if peak.median_rank is None else alike[peak.median_rank]
    return {
        "worker": rank.worker,
        "device": rank.device,
        **{name: value for name, value in asdict(peak).items() if name != "median_rank"},
        "count": rank.step_count,
        "median_worker": median and median.worker,
        "median_device": median and median.device,
        "growth_bytes": rank.growth,
    }
