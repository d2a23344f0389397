"""`tb-memplugin json`: write everything in a recording as JSON."""

from __future__ import annotations

import click

from tb_memplugin.commands.export import refuse_own_input, report_written
from tb_memplugin.commands.opening import Reading, open_trace, reading_options
from tb_memplugin.commands.options import SOURCE, json_option, output_option
from tb_memplugin.exports import json as trace_json
from tb_memplugin.exports import snapshot


@click.command("json")
@click.argument("file", type=SOURCE)
@output_option
@click.option(
    "--layout",
    type=click.Choice(["trace", "snapshot"]),
    default="trace",
    show_default=True,
    help=(
        "trace: columns and tables (docs/json_format.md). snapshot: PyTorch's own structure, as Mosaic "
        "writes it; every entry repeats its stack, so the file is many times larger."
    ),
)
@json_option("Print what was written as JSON.")
@reading_options
def command(file: str, output: str, layout: str, as_json: bool, reading: Reading) -> None:
    """Write everything in a recording as JSON.

    FILE is a memory snapshot, a Kineto trace, a raw memory timeline, a recorded window, or a recorded run's
    folder. For a folder, the window with the highest peak is taken.
    """
    refuse_own_input(file, output)
    trace = open_trace(file, reading).trace
    if layout == "trace":
        trace_json.write(trace, output)
        report_written(file, output, "json", as_json)
    else:
        report_written(file, output, "snapshot json", as_json, snapshot.write_json(trace, output))
