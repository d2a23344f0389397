"""`tb-memplugin advice`: which memory could be saved, and the evidence for it."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click
from rich import box
from rich.table import Table
from rich.text import Text

from tb_memplugin.analysis.advice_rules import RULES, Advice, Evidence, Finding, Judgement, Where, advice
from tb_memplugin.analysis.growth import WindowLevel, spread, window_levels
from tb_memplugin.analysis.units import size_text
from tb_memplugin.commands.opening import Opened, Reading, open_trace, reading_options
from tb_memplugin.commands.options import SOURCE, json_option
from tb_memplugin.commands.tables import LONGEST, Unit, console, printable
from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.store import files
from tb_memplugin.store.reader import load_window, read_recordings


@click.command("advice")
@click.argument("path", type=SOURCE)
@click.option(
    "--step", type=int, help="For a folder: number of the step. Default: the step with the highest peak."
)
@click.option("--device", help="Name of a device, such as cuda:0. Default: all.")
@click.option("--worker", help="For a folder: name of the worker. Default: the one with the highest peak.")
@json_option("Print JSON, with sizes in bytes.")
@reading_options
def command(
    path: str, step: int | None, device: str | None, worker: str | None, as_json: bool, reading: Reading
) -> None:
    """What to change to save memory, with the evidence for it.

    Looks for memory that grows, gradients that are kept, reserved memory that is never used, and savings
    that have a price. A rule that finds nothing says why. PATH is a memory snapshot, a Kineto trace, a raw
    memory timeline, a recorded window, or a recorded run's folder.
    """
    opened = open_trace(path, reading, device=device, step=step, worker=worker)
    result = advice(opened.trace, device, functools.cache(lambda: _run_levels(opened)))
    if as_json:
        click.echo(json.dumps({"source": opened.source, **_json(result)}, indent=2))
        return
    click.echo(_heading(result))
    for finding in result.findings:
        _show(finding)
    _show_judgements([judgement for judgement in result.judgements if judgement.verdict != "found"])


def _run_levels(opened: Opened) -> tuple[WindowLevel, ...]:
    """Return the levels of the worker's windows, including the opened one; a file has one window only."""
    if not files.is_folder(opened.source):
        return window_levels(opened.trace)
    steps = [step for step in read_recordings(opened.source).steps if step.folder == opened.source]
    paths = dict.fromkeys(step.side_file for step in steps if step.side_file is not None)
    levels: list[WindowLevel] = []
    for path in spread(list(paths)):
        try:
            levels += window_levels(load_window(path))
        except UnreadableFileError as error:
            click.echo(f"warning: {printable(str(error))}", err=True)
    return tuple(levels)


def _json(result: Advice) -> dict[str, Any]:
    return {
        "findings": [
            {
                **asdict(finding),
                "where": _where_json(finding.where),
                "evidence": [
                    {**asdict(row), "where": row.where and _where_json(row.where)} for row in finding.evidence
                ],
            }
            for finding in result.findings
        ],
        "judgements": [asdict(judgement) for judgement in result.judgements],
    }


def _where_json(where: Where) -> dict[str, Any]:
    return {"view": where.view, "state": dict(where.state)}


def _heading(result: Advice) -> str:
    problems = sum(finding.level == "problem" for finding in result.findings)
    options = len(result.findings) - problems
    unjudged = sum(judgement.verdict == "not judged" for judgement in result.judgements)
    return (
        f"{_count(problems, 'problem')}, {_count(options, 'option')}; "
        f"{_count(unjudged, 'rule')} could not be judged"
    )


def _count(count: int, word: str) -> str:
    return f"{count or 'no'} {word if count == 1 else word + 's'}"


def _show(finding: Finding) -> None:
    out = console()
    size = size_text(finding.bytes)
    total = size_text(finding.of_bytes)
    percent = 100 * finding.bytes / finding.of_bytes if finding.of_bytes else 0
    step = "" if finding.step is None else f", step {finding.step}"
    heading = f"{finding.level}, {finding.device}{step}: {finding.title}"
    out.print()
    out.print(printable(heading, 4 * LONGEST), soft_wrap=True)
    out.print(f"  {size} {finding.measure}: {percent:.1f} % of {total}", soft_wrap=True)
    out.print(_evidence(finding.evidence))
    if finding.price:
        out.print(f"  price: {printable(finding.price, LONGEST)}", soft_wrap=True)
    out.print(f"  to do: {finding.what_to_do}", soft_wrap=True)
    out.print(f"  in the tab: {_address(finding.where)}", soft_wrap=True)


def _evidence(rows: Sequence[Evidence]) -> Table:
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
