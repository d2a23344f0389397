"""`tb-memplugin trace`: the events of the allocator as text, one a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import click
import numpy as np

from tb_memplugin.analysis.pool_names import stream_name
from tb_memplugin.analysis.source_lines import lines_of
from tb_memplugin.analysis.units import size_text
from tb_memplugin.commands.opening import Reading, open_trace, reading_options
from tb_memplugin.commands.options import SOURCE, json_option
from tb_memplugin.commands.ranges import Range, range_options
from tb_memplugin.commands.tables import printable
from tb_memplugin.trace import Kind, MemoryTrace
from tb_memplugin.trace.tables import Rows, code_mask


@click.command("trace")
@click.argument("path", type=SOURCE)
@click.option("--device", help="Name of a device. Default: all.")
@click.option(
    "--filter-freed", is_flag=True, help="Leave out blocks that were freed by the last event of the range."
)
@click.option("--stacks", is_flag=True, help="Show whole stacks, innermost frame first.")
@range_options
@json_option("Print one JSON object a line, with sizes in bytes and times in nanoseconds.")
@reading_options
def command(
    path: str,
    device: str | None,
    filter_freed: bool,
    stacks: bool,
    within: Range,
    as_json: bool,
    reading: Reading,
) -> None:
    """The events of the allocator, one a line: number, time, action, address, bytes, stream and source line.

    PATH is a memory snapshot, a Kineto trace, a recorded window, or a recorded run's folder.
    """
    trace = open_trace(path, reading, device=device).trace
    first, last = within.events(trace, device)
    for row in trace.device_rows(device):
        shown = _rows(trace, row, first, last, filter_freed)
        if not as_json:
            click.echo(_heading(trace, row, len(shown)))
        for event in _events(trace, row, shown):
            click.echo(json.dumps(event) if as_json else _line(event, stacks))


def _heading(trace: MemoryTrace, device: int, count: int) -> str:
    before = size_text(int(trace.live(device)[0]))
    return f"{printable(trace.devices[device].name)}: {count:,} events; {before} live before the first of all"


def _rows(trace: MemoryTrace, device: int, first: int, last: int, filter_freed: bool) -> Rows:
    """Return the events of a device in a range; with `filter_freed` without blocks that end in it."""
    events, blocks = trace.events, trace.allocations
    shown = np.zeros(len(events), bool)
    shown[first : last + 1] = events.device[first : last + 1] == device
    if filter_freed:
        freed = blocks.born[(blocks.device == device) & (blocks.freed <= last)]
        shown[freed[freed >= 0]] = False
        shown[code_mask((Kind.FREE_REQUESTED, Kind.FREE_COMPLETED, Kind.STORAGE_FREE))[events.kind]] = False
    return np.flatnonzero(shown)


def _events(trace: MemoryTrace, device: int, rows: Rows) -> Iterator[dict[str, Any]]:
    """Yield events as JSON objects; what is not recorded is None."""
    events = trace.events
    line, lines = lines_of(trace.stacks)
    timed = trace.times_are_known
    first = int(events.time_ns[0]) if timed else 0
    live = trace.live(device)
    for row in rows.tolist():
        stack = int(trace.own_stacks[row])
        address = int(events.address[row])
        yield {
            "device": trace.devices[device].name,
            "event": row,
            "time_ns": int(events.time_ns[row]) if timed else None,
            "seconds": (int(events.time_ns[row]) - first) / 1e9 if timed else None,
            "action": Kind(int(events.kind[row])).name.lower(),
            "address": address or None,
            "bytes": int(events.bytes[row]),
            "stream": stream_name(trace, int(events.stream[row])),
            "live_bytes": int(live[row + 1]),
            "line": lines[line[stack]] if stack >= 0 else None,
            "stack": list(trace.stack(stack)),
        }


def _line(event: dict[str, Any], stacks: bool) -> str:
    time = "?" if event["seconds"] is None else f"{event['seconds']:.6f}"
    address = f"{event['address'] or 0:#x}"
    parts = f"{event['event']:>8} {time:>12} {event['action']:<14} {address:<18} {event['bytes']:>15,}"
    text = f"{parts}  {event['stream']}  {event['line'] or ''}".rstrip()
    frames = [f"{'':>10}{frame}" for frame in event["stack"]] if stacks else []
    return "\n".join(map(printable, (text, *frames)))
