"""`tb-memplugin diff`: what changed between two peaks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click

from tb_memplugin.analysis.comparison import Delta, DeviceComparison, compare, shortened_deltas
from tb_memplugin.commands.divisions import REST, division, division_name, division_options, shown_key
from tb_memplugin.commands.opening import Reading, open_trace, reading_options
from tb_memplugin.commands.options import SOURCE, json_option
from tb_memplugin.commands.tables import LONGEST, Unit, console, printable, table

SHOWN = 20
ROW_FIELDS = ("key", "status", "base_bytes", "other_bytes", "delta_bytes")


@click.command("diff")
@click.argument("base", type=SOURCE)
@click.argument("other", type=SOURCE)
@division_options
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
    recorded run's folder; they may be of different kinds. The rows sum to the difference.
    """
    chosen = division(by, rules)
    traces = [open_trace(path, reading, device=device, step=step).trace for path in (base, other)]
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
    out = console()
    unit = Unit.for_bytes([comparison.base_peak_bytes, comparison.other_peak_bytes])
    rows = [
        (
            shown_key(row.key),
            row.status,
            unit.show(row.base_bytes),
            unit.show(row.other_bytes),
            _signed(unit, row.delta_bytes),
        )
        for row in top_rows(comparison.rows, top)
    ]
    total = (
        "total",
        "",
        unit.show(comparison.base_peak_bytes),
        unit.show(comparison.other_peak_bytes),
        _signed(unit, comparison.delta_bytes),
    )
    out.print(printable(_heading(comparison, unit), LONGEST), soft_wrap=True)
    out.print(table((by, "", "base", "other", f"{unit.name} more"), [*rows, total]))


def _heading(comparison: DeviceComparison, unit: Unit) -> str:
    names = list(dict.fromkeys((comparison.device or "(none)", comparison.other_device or "(none)")))
    return (
        f"{' against '.join(names)}: peak {unit.text(comparison.base_peak_bytes)}, "
        f"then {unit.text(comparison.other_peak_bytes)}"
    )


def _signed(unit: Unit, size: int) -> str:
    return f"{'+' if size > 0 else '-' if size < 0 else ''}{unit.show(abs(size))}"
