"""`tb-memplugin usage`: the live bytes before and after one block was allocated or freed."""

from __future__ import annotations

import json
from typing import Any

import click

from tb_memplugin.analysis.allocations import Action, Usage, read_allocation, usage
from tb_memplugin.analysis.units import size_text
from tb_memplugin.commands.opening import Reading, open_trace, reading_options
from tb_memplugin.commands.options import SOURCE, json_option
from tb_memplugin.commands.tables import LONGEST, Unit, printable, show_table


@click.command("usage")
@click.argument("path", type=SOURCE)
@click.option(
    "--allocation",
    required=True,
    metavar="ADDR[_VERSION]",
    help="Address in hexadecimal; _VERSION is the number of the block at that address, counted from 0.",
)
@click.option(
    "--action",
    type=click.Choice(["alloc", "free"]),
    default="alloc",
    show_default=True,
    help="Whether to show the allocation or its free.",
)
@click.option("--device", help="Name of a device. Default: the first that has this allocation.")
@json_option("Print JSON, with sizes in bytes and times in nanoseconds.")
@reading_options
def command(
    path: str, allocation: str, action: Action, device: str | None, as_json: bool, reading: Reading
) -> None:
    """Live bytes before and after one allocation, or the free of it.

    PATH is a memory snapshot, a Kineto trace, a recorded window, or a recorded run's folder.
    """
    address, version = read_allocation(allocation)
    trace = open_trace(path, reading, device=device).trace
    result = usage(trace, address, version, action, device)
    if as_json:
        click.echo(json.dumps(_json(result), indent=2))
    else:
        _show(result, action)


def _json(result: Usage) -> dict[str, Any]:
    block = result.allocation
    return {
        "device": result.device,
        "event": result.event,
        "bytes_before": result.bytes_before,
        "bytes_after": result.bytes_after,
        "allocation": {
            "key": f"{block.address:#x}_{block.version}",
            "address": block.address,
            "version": block.version,
            "bytes": block.bytes,
            "rounded_bytes": block.rounded_bytes,
            "alloc_event": block.born_event,
            "alloc_time_ns": block.born_ns,
            "free_event": block.freed_event,
            "free_time_ns": block.freed_ns,
            "tensor": block.tensor,
            "why": block.why,
            "stack": list(block.frames),
        },
    }


def _show(result: Usage, action: Action) -> None:
    document = _json(result)
    block = document["allocation"]
    unit = Unit.for_bytes([result.bytes_before, result.bytes_after])
    change = result.bytes_after - result.bytes_before
    sign = "+" if change >= 0 else "-"
    rows = [
        ("before", unit.show(result.bytes_before)),
        (action, f"{sign}{unit.show(abs(change))}"),
        ("after", unit.show(result.bytes_after)),
    ]
    size = ", ".join(filter(None, (size_text(block["bytes"]), block["tensor"])))
    of = f"{action} of {block['key']} ({printable(size)}) on {printable(result.device)}"
    click.echo(f"{of}, event {document['event']}")
    show_table(("live", unit.name), rows)
    click.echo(printable(block["why"], LONGEST))
    for frame in block["stack"]:
        click.echo(f"  {printable(frame, LONGEST)}")
