"""`tb-memplugin stages`: the live bytes at the beginning and at the end of every annotation."""

from __future__ import annotations

import json
from collections.abc import Sequence

import click

from tb_memplugin.analysis.annotations import Stage, stages
from tb_memplugin.commands.opening import Reading, open_trace, reading_options
from tb_memplugin.commands.options import SOURCE, json_option
from tb_memplugin.commands.tables import Unit, printable, show_table
from tb_memplugin.errors import MemPluginError


@click.command("stages")
@click.argument("path", type=SOURCE)
@click.argument("more", nargs=-1, metavar="")
@click.option(
    "--annotation",
    "names",
    multiple=True,
    metavar="NAME...",
    help="Show only annotations with these names. Default: all.",
)
@click.option("--device", help="Name of a device. Default: all.")
@json_option("Print JSON, with sizes in bytes and times in nanoseconds.")
@reading_options
def command(
    path: str, more: Sequence[str], names: Sequence[str], device: str | None, as_json: bool, reading: Reading
) -> None:
    """Live bytes at the START and END of every annotation, for each device.

    Annotations are written by `record_function` and by optimizers. PATH is a memory snapshot, a Kineto
    trace, a recorded window, or a recorded run's folder.
    """
    if more and not names:
        raise MemPluginError(
            f"One file at a time: {more[0]!r} is one too many.",
            where="stages",
            fix="Run the command once per file.",
        )
    opened = open_trace(path, reading, device=device)
    if device is not None:
        opened.trace.device_row(device)
    chosen = [
        stage
        for stage in stages(opened.trace, (*names, *more) or None)
        if device is None or stage.device == device
    ]
    if as_json:
        fields = ("key", "name", "stage", "device", "time_ns", "bytes")
        rows = [{field: getattr(stage, field) for field in fields} for stage in chosen]
        click.echo(json.dumps({"stages": rows}, indent=2))
    elif chosen:
        _show(chosen)
    else:
        click.echo(f"{printable(opened.source)} has no annotations.")


def _show(shown: Sequence[Stage]) -> None:
    unit = Unit.for_bytes(stage.bytes for stage in shown)
    began = shown[0].time_ns
    rows = [
        (stage.key, stage.device, f"{(stage.time_ns - began) / 1e9:,.6f}", unit.show(stage.bytes))
        for stage in shown
    ]
    show_table(("stage", "device", "s", unit.name), rows)
