"""`tb-memplugin advice`: which memory could be saved, and the evidence for it."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from tb_memplugin.analysis.advice_rules import RULES, advice, advice_on_steps, heading
from tb_memplugin.analysis.findings import Evidence, Finding, Judgement, Where
from tb_memplugin.analysis.growth import WindowLevel, spread, window_levels
from tb_memplugin.analysis.peak_holders import PeakHolders
from tb_memplugin.analysis.units import counted, part_text, size_text
from tb_memplugin.commands.opening import (
    Opened,
    Reading,
    highest_or_dump,
    highest_watched,
    open_trace,
    reading_options,
)
from tb_memplugin.commands.options import SOURCE, json_option
from tb_memplugin.commands.tables import LONGEST, Unit, console, percent, printable
from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.store import files
from tb_memplugin.trace.result import json_value

if TYPE_CHECKING:
    from rich.table import Table

MOST_HOLDERS, MOST_FINDINGS = 3, 4
"""How many of them are shown without --details."""


@click.command("advice")
@click.argument("path", type=SOURCE)
@click.option(
    "--step", type=int, help="For a folder: number of the step. Default: the step with the highest peak."
)
@click.option("--device", help="Name of a device, such as cuda:0. Default: all.")
@click.option("--worker", help="For a folder: name of the worker. Default: the one with the highest peak.")
@click.option("--details", is_flag=True, help="All findings with their evidence, and every rule's judgement.")
@json_option("Print JSON, with sizes in bytes.")
@reading_options
def command(
    path: str,
    step: int | None,
    device: str | None,
    worker: str | None,
    details: bool,
    as_json: bool,
    reading: Reading,
) -> None:
    """Who fills the peak, and what to change to save memory, in about ten lines.

    Looks for memory that grows, what would have made a failed request fit, stored attention scores, unused
    reserve and more, and for savings that have a price. With --details, a rule that finds nothing says why.
    PATH is a memory snapshot, a Kineto trace, a raw
    memory timeline, a recorded window, or a recorded run's folder.
    """
    watched, recordings = highest_watched(path), None
    if watched is not None:
        from tb_memplugin.store.reader import read_recordings  # files need none of it

        recordings = read_recordings(path)
    if watched is not None and recordings is not None and not recordings.steps:
        source, result = watched.folder, advice_on_steps(watched.figures)
    else:
        opened = open_trace(path, reading, device=device, step=step, worker=worker, choose=highest_or_dump)
        levels = functools.cache(lambda: _run_levels(opened))
        source = opened.source
        beside = None if recordings is None else recordings.watched_beside(source)
        result = advice(opened.trace, device, levels, beside)
    if as_json:
        document = {
            "source": source,
            "peaks": result.peaks,
            "findings": result.findings,
            "judgements": result.judgements,
        }
        click.echo(json.dumps(document, indent=2, default=json_value))
        return
    for peak in result.peaks:
        _show_peak(peak, MOST_HOLDERS if peak is result.peaks[0] else 0)
    click.echo(printable(heading(result)))
    if not details:
        shown = _different(result.findings)[:MOST_FINDINGS]
        for finding in shown:
            _show_briefly(finding)
        click.echo(_rest(len(result.findings) - len(shown)))
        return
    for finding in result.findings:
        _show(finding)
    _show_judgements([judgement for judgement in result.judgements if judgement.verdict != "found"])


def _run_levels(opened: Opened) -> tuple[WindowLevel, ...]:
    """Return the levels of the worker's windows, including the opened one; a file has one window only."""
    if not files.is_folder(opened.source):
        return window_levels(opened.trace)
    from tb_memplugin.store.reader import load_window, read_recordings

    steps = [step for step in read_recordings(opened.source).steps if step.folder == opened.source]
    paths = dict.fromkeys(step.side_file for step in steps if step.side_file is not None)
    levels: list[WindowLevel] = []
    for path in spread(list(paths)):
        try:
            levels += window_levels(load_window(path))
        except UnreadableFileError as error:
            click.echo(f"warning: {printable(str(error))}", err=True)
    return tuple(levels)


def _show_peak(peak: PeakHolders, most: int) -> None:
    """Print what a peak consists of, and its largest holders with the sum of the others."""
    unit = Unit.for_bytes([peak.bytes])
    parts = ", ".join(
        f"{name.replace('_', ' ')} {percent(size, peak.bytes)} %" for name, size in peak.categories[:3]
    )
    where = f"step {peak.step}, event {peak.event:,}" if peak.event >= 0 else "before the first event"
    click.echo(printable(f"{peak.device}: {unit.text(peak.bytes)} at the peak ({where}): {parts}"))
    for holder in peak.holders[:most]:
        kind = f", {holder.category.replace('_', ' ')}" if holder.is_name else ""
        name = holder.name if holder.is_name else holder.name.replace("_", " ")
        text = f"{printable(name, LONGEST)}: {counted(holder.blocks, 'block')}{kind}"
        click.echo(f"  {unit.text(holder.bytes)}, {percent(holder.bytes, peak.bytes)} %  {text}")
    rest = peak.holders[most:]
    if most and rest:
        size = sum(holder.bytes for holder in rest)
        text = counted(len(rest), "other")
        click.echo(f"  {unit.text(size)}, {percent(size, peak.bytes)} %  {text}")


def _show_briefly(finding: Finding) -> None:
    share = f"{percent(finding.bytes, finding.of_bytes)} % of {size_text(finding.of_bytes)}"
    title = printable(f"{finding.level}, {finding.device}: {finding.title}", 4 * LONGEST)
    click.echo(f"  {part_text(finding.bytes, finding.of_bytes)} {finding.measure}, {share}. {title}")
    price = f" Price: {printable(finding.price, LONGEST)}." if finding.price else ""
    click.echo(f"    To do: {printable(finding.what_to_do, 4 * LONGEST)}{price}")


def _different(findings: Sequence[Finding]) -> list[Finding]:
    """Return the first finding of each rule on each name: other devices have the same remedy."""
    first: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        first.setdefault((finding.kind, finding.subject), finding)
    return [*first.values()]


def _rest(more: int) -> str:
    begin = f"{counted(more, 'more finding')}, the" if more > 0 else "The"
    return f"{begin} evidence, and what each rule says: --details"


def _show(finding: Finding) -> None:
    size = part_text(finding.bytes, finding.of_bytes)
    total = size_text(finding.of_bytes)
    percent = 100 * finding.bytes / finding.of_bytes if finding.of_bytes else 0
    step = "" if finding.step is None else f", step {finding.step}"
    title = f"{finding.level}, {finding.device}{step}: {finding.title}"
    click.echo()
    click.echo(printable(title, 4 * LONGEST))
    click.echo(f"  {size} {finding.measure}: {percent:.1f} % of {total}")
    console().print(_evidence(finding.evidence))
    if finding.price:
        click.echo(f"  price: {printable(finding.price, LONGEST)}")
    click.echo(f"  to do: {printable(finding.what_to_do, 4 * LONGEST)}")
    click.echo(f"  in the tab: {_address(finding.where)}")


def _evidence(rows: Sequence[Evidence]) -> Table:
    from rich import box  # details alone need rich
    from rich.table import Table
    from rich.text import Text

    unit = Unit.for_bytes([row.bytes for row in rows])
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    drawn.add_column("  evidence", overflow="fold")
    drawn.add_column(unit.name, justify="right", no_wrap=True)
    drawn.add_column("", overflow="fold")
    for row in rows:
        cells = (f"  {printable(row.what, LONGEST)}", unit.show(row.bytes), printable(row.detail, LONGEST))
        drawn.add_row(*map(Text, cells))
    return drawn


def _address(where: Where) -> str:
    state = ", ".join(f"{key} {printable(value, 80)}" for key, value in where.state)
    return f"{where.view.capitalize()} ({state})" if state else where.view.capitalize()


def _show_judgements(judgements: Sequence[Judgement]) -> None:
    if not judgements:
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("rule", "device", "", "why"):
        drawn.add_column(name, overflow="fold", no_wrap=name != "why")
    for judgement in judgements:
        cells = (
            RULES[judgement.kind].name,
            printable(judgement.device, 40),
            judgement.verdict,
            printable(judgement.why, 4 * LONGEST),
        )
        drawn.add_row(*map(Text, cells))
    console().print(drawn)
