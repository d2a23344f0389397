"""`tb-memplugin diff`: what changed between two peaks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import click

from tb_memplugin.analysis.comparison import (
    Delta,
    DeviceComparison,
    SegmentComparison,
    SegmentDelta,
    compare,
    compare_segments,
    shortened_deltas,
)
from tb_memplugin.commands.divisions import REST, division, division_name, division_options, shown_key
from tb_memplugin.commands.opening import Reading, open_trace, reading_options
from tb_memplugin.commands.options import SOURCE, json_option
from tb_memplugin.commands.tables import LONGEST, Unit, printable, show_table
from tb_memplugin.errors import MemPluginError

SHOWN, SEGMENT = 20, "segment"
ROW_FIELDS = ("key", "status", "base_bytes", "other_bytes", "delta_bytes")


@click.command("diff")
@click.argument("base", type=SOURCE)
@click.argument("other", type=SOURCE)
@partial(division_options, more=(SEGMENT,))
@click.option("--device", help="Name of a device that both have. Default: all.")
@click.option(
    "--step", type=int, help="Number of a step that both have. Default: the step with the highest peak."
)
@click.option(
    "--top", type=click.IntRange(min=0), help=f"Number of rows; 0: all. Default: {SHOWN}; with --json all."
)
@json_option("Print JSON, with sizes in bytes.")
@reading_options
def command(
    base: str,
    other: str,
    by: str | None,
    rules: Sequence[str],
    device: str | None,
    step: int | None,
    top: int | None,
    as_json: bool,
    reading: Reading,
) -> None:
    """What changed between the peaks of BASE and OTHER, for each device.

    Each of them is a memory snapshot, a Kineto trace, a raw memory timeline, a recorded window, or a
    recorded run's folder; they may be of different kinds. The rows sum to the difference. With --by segment,
    they are the segments that are reserved at the end of the recordings.
    """
    if by == SEGMENT and (rules or step is not None):
        raise MemPluginError(
            "Segments are compared at the end of the recordings.",
            where=f"--by {SEGMENT}",
            fix="Leave --rules and --step out.",
        )
    chosen = None if by == SEGMENT else division(by, rules)
    traces = [open_trace(path, reading, device=device, step=step).trace for path in (base, other)]
    if chosen is None:
        compared = compare_segments(traces[0], traces[1], device)
        _show_segments(compared, SHOWN if top is None else top, as_json)
        return
    comparisons = compare(*traces, device=device, step=step, by=chosen)
    if as_json:
        devices = [_json(comparison, top or 0) for comparison in comparisons]
        click.echo(json.dumps({"devices": devices}, indent=2))
        return
    for comparison in comparisons:
        _show(comparison, division_name(chosen), SHOWN if top is None else top)


def top_rows(rows: Sequence[Delta], top: int) -> list[Delta]:
    """Return the `top` largest changes, and one row for all the others, with the same sum; 0 keeps all."""
    return list(shortened_deltas(rows, top or len(rows), REST))


def _show_segments(comparisons: Sequence[SegmentComparison], top: int, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"devices": [asdict(each) for each in comparisons]}, indent=2))
        return
    for each in comparisons:
        unit = Unit.for_bytes([each.base_reserved_bytes, each.other_reserved_bytes])
        names = _names(each.device, each.other_device)
        sizes = f"reserved {unit.text(each.base_reserved_bytes)}, then {unit.text(each.other_reserved_bytes)}"
        click.echo(printable(f"{names}: {sizes}", LONGEST))
        differing = [segment for segment in each.segments if segment.status != "same"]
        rows = [_segment_row(segment, unit) for segment in differing[: top or None]]
        same = [segment for segment in each.segments if segment.status == "same"]
        shown = len(rows)
        for status in ("added", "removed", "same"):
            rest = [segment.bytes for segment in (*differing[shown:], *same) if segment.status == status]
            if rest:
                rows.append((f"({len(rest):,} more)", status, unit.show(sum(rest)), ""))
        show_table(("segment", "", unit.name, "live"), rows)


def _segment_row(segment: SegmentDelta, unit: Unit) -> tuple[str, str, str, str]:
    live = segment.base_live_bytes if segment.status == "removed" else segment.other_live_bytes
    name = f"{segment.address:#x} {segment.pool}, {segment.stream}"
    return name, segment.status, unit.show(segment.bytes), unit.show(live or 0)


def _json(comparison: DeviceComparison, top: int) -> dict[str, Any]:
    """Return a comparison for JSON; it has `other_device` only if the two sides' names differ."""
    device = comparison.device or comparison.other_device
    return {
        "device": device,
        **({"other_device": comparison.other_device} if comparison.other_device not in ("", device) else {}),
        "base_peak_bytes": comparison.base_peak_bytes,
        "other_peak_bytes": comparison.other_peak_bytes,
        "rows": [
            {field: getattr(row, field) for field in ROW_FIELDS} for row in top_rows(comparison.rows, top)
        ],
    }


def _show(comparison: DeviceComparison, by: str, top: int) -> None:
    unit = Unit.for_bytes([comparison.base_peak_bytes, comparison.other_peak_bytes])
    rows = [
        (
            shown_key(row.key),
            row.status,
            unit.show(row.base_bytes),
            unit.show(row.other_bytes),
            unit.signed(row.delta_bytes),
        )
        for row in top_rows(comparison.rows, top)
    ]
    total = (
        "total",
        "",
        unit.show(comparison.base_peak_bytes),
        unit.show(comparison.other_peak_bytes),
        unit.signed(comparison.delta_bytes),
    )
    click.echo(printable(_heading(comparison, unit), LONGEST))
    show_table((by, "", "base", "other", f"{unit.name} more"), [*rows, total])


def _heading(comparison: DeviceComparison, unit: Unit) -> str:
    names = _names(comparison.device, comparison.other_device)
    return (
        f"{names}: peak {unit.text(comparison.base_peak_bytes)}, "
        f"then {unit.text(comparison.other_peak_bytes)}"
    )


def _names(device: str, other_device: str) -> str:
    return " against ".join(dict.fromkeys((device or "(none)", other_device or "(none)")))
