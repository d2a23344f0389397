"""`tb-memplugin profile`: an HTML page of memory over time, by annotation, category, context or rules."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from tb_memplugin.analysis.divisions import By
from tb_memplugin.analysis.rules import read_rules
from tb_memplugin.commands.export import refuse_own_input, report_written
from tb_memplugin.commands.opening import Reading, open_trace, reading_options
from tb_memplugin.commands.options import PATH, SOURCE, json_option, output_option
from tb_memplugin.commands.ranges import Range, range_options
from tb_memplugin.errors import MemPluginError
from tb_memplugin.exports import html
from tb_memplugin.exports.html import Division, Plot

PROFILES: dict[str, By] = {"annotations": "annotation", "categories": "category", "context": "context"}
CUSTOM = "custom"


@click.command("profile")
@click.argument("file", type=SOURCE)
@click.option("--by", type=click.Choice([*PROFILES, CUSTOM]), required=True, help="What to divide by.")
@click.option(
    "--rules",
    type=PATH,
    metavar="TEXT",
    multiple=True,
    help="With --by custom: name=regex, or a JSON file of rules. The first match wins.",
)
@range_options
@click.option(
    "--sampling-rate",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Draw the level after every so many events of a device, and at its peak.",
)
@click.option("--filter-freed", is_flag=True, help="Leave out blocks that were freed by the last event.")
@click.option(
    "--order",
    type=click.Choice(["bytes", "allocation"]),
    default="bytes",
    show_default=True,
    help="Stack the parts by their bytes, or in the order in which they first allocated.",
)
@output_option
@json_option("Print what was written as JSON.")
@reading_options
def command(
    file: str,
    by: str,
    rules: Sequence[str],
    within: Range,
    sampling_rate: int,
    filter_freed: bool,
    order: str,
    output: str,
    as_json: bool,
    reading: Reading,
) -> None:
    """Write an HTML page of memory over time, divided by what you choose.

    FILE is a memory snapshot, a Kineto trace, a raw memory timeline, a recorded window, or a recorded run's
    folder. For a folder, the window with the highest peak is taken.
    """
    refuse_own_input(file, output)
    division = _division(by, rules)
    trace = open_trace(file, reading).trace
    first, last = within.events(trace)
    plot = Plot(first, last, sampling_rate, filter_freed, order == "allocation")
    html.write(trace, output, [division], Path(file).name, plot)
    report_written(file, output, "html", as_json)


def _division(by: str, rules: Sequence[str]) -> Division:
    if by != CUSTOM:
        if rules:
            raise MemPluginError(
                f"--rules cannot be used with --by {by}.", where="--rules", fix=f"Give --by {CUSTOM}."
            )
        return Division(PROFILES[by], PROFILES[by].capitalize())
    if not rules:
        raise MemPluginError(
            "A custom profile needs rules.",
            where="--by custom",
            fix="Give --rules name=regex, or a JSON file.",
        )
    return Division(read_rules(rules), "Rules")
