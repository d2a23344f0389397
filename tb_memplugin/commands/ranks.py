"""`tb-memplugin ranks`: the workers of a run side by side, the highest first."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import click
import numpy as np

from tb_memplugin.analysis.ranks import RankPeak, RankSteps, rank_peaks
from tb_memplugin.commands.opening import peaks, recordings_below
from tb_memplugin.commands.options import PATH, json_option
from tb_memplugin.commands.tables import NOT_KNOWN, Unit, show_table
from tb_memplugin.errors import NotRecordedError
from tb_memplugin.store.reader import Recordings

Rank = tuple[str, str]
"""A worker, and one of its devices."""


@click.command("ranks")
@click.argument("path", type=PATH)
@click.option(
    "--top", type=click.IntRange(min=0), default=20, show_default=True, help="Number of rows; 0: all."
)
@json_option("Print JSON, with sizes in bytes.")
def command(path: str, top: int, as_json: bool) -> None:
    """Which worker of the run in the folder PATH peaks highest, in which step, and how far from the others.

    The median is the rank in the middle of all that have that step, on devices of the same type.
    """
    by_rank = _steps_by_rank(recordings_below(path))
    if not by_rank:
        raise NotRecordedError("This folder has no recording.", where=path, fix="Give a run's folder.")
    rows = sorted(_rows(by_rank), key=lambda row: -row[1].highest_bytes)[: top or None]
    if as_json:
        click.echo(json.dumps({"source": path, "ranks": [_json(*row) for row in rows]}, indent=2))
        return
    unit = Unit.for_bytes([rows[0][1].highest_bytes])
    cells = [_cells(*row, unit) for row in rows]
    show_table(("rank", "device", f"peak {unit.name}", "in step", "above the median", "steps"), cells)
    if len(rows) < len(by_rank):
        click.echo(f"{len(rows):,} of {len(by_rank):,} ranks; --top 0 shows all.")


def _rows(by_rank: dict[Rank, RankSteps]) -> Iterator[tuple[Rank, RankPeak, list[Rank]]]:
    """Yield each rank, its peak, and the ranks it is compared with: those on devices of the same type."""
    for kind in dict.fromkeys(_type(device) for _, device in by_rank):
        names = [rank for rank in by_rank if _type(rank[1]) == kind]
        for rank, peak in zip(names, rank_peaks([by_rank[rank] for rank in names]), strict=True):
            yield rank, peak, names


def _type(device: str) -> str:
    return device.partition(":")[0]


def _steps_by_rank(recordings: Recordings) -> dict[Rank, RankSteps]:
    """Return the peak of each step by rank: what was recorded in full, else the monitor's figures."""
    bytes_of: dict[Rank, dict[int, int]] = {}
    for series in recordings.watched:
        for device in series.figures.devices:
            figures = bytes_of.setdefault((series.worker, device.name), {})
            figures.update(zip(series.figures.steps.tolist(), device.peak.tolist(), strict=True))
    for step in recordings.steps:
        for name, size in peaks(step).items():
            bytes_of.setdefault((step.metadata.worker, name), {})[step.metadata.step] = size
    return {rank: _rank_steps(figures) for rank, figures in sorted(bytes_of.items())}


def _rank_steps(figures: dict[int, int]) -> RankSteps:
    steps = sorted(figures)
    return RankSteps(np.array(steps, np.int64), np.array([figures[step] for step in steps], np.int64))


def _cells(rank: Rank, peak: RankPeak, names: Sequence[Rank], unit: Unit) -> tuple[str, ...]:
    above = NOT_KNOWN
    if peak.median_rank is not None and peak.median_bytes:
        share = 100 * (peak.highest_bytes - peak.median_bytes) / peak.median_bytes
        worker, device = names[peak.median_rank]
        above = f"{share:+.1f} % ({worker if len({name for name, _ in names}) > 1 else device})"
    return (rank[0], rank[1], unit.show(peak.highest_bytes), str(peak.highest_step), above, f"{peak.count:,}")


def _json(rank: Rank, peak: RankPeak, names: Sequence[Rank]) -> dict[str, Any]:
    median = None if peak.median_rank is None else names[peak.median_rank]
    return {
        "worker": rank[0],
        "device": rank[1],
        **{name: value for name, value in asdict(peak).items() if name != "median_rank"},
        "median_worker": median and median[0],
        "median_device": median and median[1],
    }
