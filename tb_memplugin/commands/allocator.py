"""`tb-memplugin allocator`: segments, pools, fragmentation, and why memory ran out.

With `--replay`, `--alloc-conf` or `--capacity`: what the simulator makes of the same requests.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import click
from rich.console import RenderableType

from tb_memplugin.analysis.allocator import Fragmentation, PoolState
from tb_memplugin.analysis.allocator_state import DeviceState, device_state
from tb_memplugin.analysis.divisions import breakdown
from tb_memplugin.analysis.oom import OomReport
from tb_memplugin.analysis.segments import SegmentState
from tb_memplugin.analysis.units import read_size, size_text
from tb_memplugin.commands.divisions import shown_key, top_parts
from tb_memplugin.commands.export import refuse_own_input
from tb_memplugin.commands.opening import Opened, Reading, open_trace, reading_options
from tb_memplugin.commands.options import PATH, SOURCE, json_option
from tb_memplugin.commands.tables import NOT_KNOWN, Unit, console, printable, shown, table
from tb_memplugin.errors import MemPluginError, NotRecordedError
from tb_memplugin.exports import snapshot
from tb_memplugin.exports.json import parts_json
from tb_memplugin.exports.output import STDOUT
from tb_memplugin.simulator import AllocatorSettings, FirstMiss, Replay, replay, simulated_trace
from tb_memplugin.simulator.allocator_settings import not_followed, records_settings
from tb_memplugin.simulator.replay import Failure
from tb_memplugin.trace import MemoryTrace


@dataclass(frozen=True, slots=True)
class Simulation:
    """The values of the simulation options; see their help."""

    beside_record: bool = False
    conf: str | None = None
    capacity: int | None = None
    output: str | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether any simulation option was given."""
        return self.beside_record or self.is_other or self.output is not None

    @property
    def is_other(self) -> bool:
        """Whether to simulate other settings or another device than the recorded ones.

        With `--replay`, both options describe the recording instead.
        """
        return not self.beside_record and (self.conf is not None or self.capacity is not None)


def simulation_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the simulation options to a command, which receives them as `simulation`."""

    @functools.wraps(command)
    def with_simulation(
        *args: Any,
        replay: bool,
        alloc_conf: str | None,
        capacity: str | None,
        output: str | None,
        **options: Any,
    ) -> None:
        most = None if capacity is None else read_size(capacity, "--capacity")
        command(*args, simulation=Simulation(replay, alloc_conf, most, output), **options)

    options = (
        click.option("--replay", is_flag=True, help="Compare a simulated allocator with the recorded one."),
        click.option(
            "--alloc-conf",
            metavar="TEXT",
            help=(
                "Simulate these settings, in the syntax of PYTORCH_CUDA_ALLOC_CONF, from the first event on. "
                "With --replay: the recording was made with them."
            ),
        ),
        click.option(
            "--capacity",
            metavar="SIZE",
            help=(
                "Simulate a device with this much memory: 24GiB, or bytes. "
                "With --replay: the recorded device has this much."
            ),
        ),
        click.option(
            "-o", "--output", type=PATH, help="Write the simulation as a memory snapshot, for any viewer."
        ),
    )
    return functools.reduce(lambda wrapped, option: option(wrapped), reversed(options), with_simulation)


def simulate(opened: Opened, device: str | None, simulation: Simulation, as_json: bool) -> None:
    """Replay a recording's devices in the simulated allocator, and print the result.

    Raises:
        MemPluginError: the settings are invalid, the trace has no such device, or the output file cannot be
            written.
    """
    trace = opened.trace
    settings = None if simulation.conf is None else AllocatorSettings.from_conf(simulation.conf)
    rows = range(len(trace.devices)) if device is None else [trace.device_row(device)]
    replays = [
        replay(trace, row, settings, simulation.capacity, recorded=simulation.beside_record or None)
        for row in rows
        if trace.devices[row].has_reserved
    ]
    if simulation.output is not None:
        _write(opened, replays, simulation.output)
    for note in not_followed(simulation.conf or ""):
        click.echo(f"note: {note}", err=True)
    describe = _what_if if simulation.is_other else _beside_record
    if as_json:
        click.echo(json.dumps({"devices": [describe(result) for result in replays]}, indent=2))
    elif not replays:
        click.echo(f"{printable(opened.source)} has no device with a caching allocator.")
    else:
        _show_replays(replays, is_other=simulation.is_other)


def _write(opened: Opened, replays: Sequence[Replay], output: str) -> None:
    refuse_own_input(opened.source, output)
    if output == STDOUT:
        raise MemPluginError("stdout gets the tables already.", where="-o -", fix="Give a file with -o.")
    if not replays:
        raise MemPluginError("Nothing was simulated, so nothing was written.", where=opened.source)
    for note in snapshot.write(simulated_trace(replays), output):
        click.echo(f"note: {printable(note)}", err=True)


def _beside_record(result: Replay) -> dict[str, Any]:
    """Return a replay compared with its record, for JSON; addresses are null if segments are not recorded."""
    fields = ("bytes", "recorded_address", "simulated_address", "cause")
    return {
        "device": _name(result),
        "allocs": result.allocs,
        "exact_addresses": result.exact_addresses if result.follows_record else None,
        "first_miss": _at(result.first_miss, fields),
        "reserved_peak_recorded": result.reserved_peak_recorded,
        "reserved_peak_simulated": result.reserved_peak,
        "settings": result.settings.conf,
        "settings_recorded": records_settings(result.source),
    }


def _what_if(result: Replay) -> dict[str, Any]:
    """Return a replay with other settings or another device, for JSON."""
    fields = ("requested_bytes", "reserved_bytes", "live_bytes")
    return {
        "device": _name(result),
        "settings": result.settings.conf,
        "capacity_bytes": result.capacity,
        "fits": result.failure is None,
        "failure": _at(result.failure, fields),
        "recorded_failures_that_fit": list(result.rescued),
        "allocs": result.allocs,
        "reserved_peak_recorded": result.reserved_peak_recorded,
        "reserved_peak_simulated": result.reserved_peak,
    }


def _at(miss_or_failure: FirstMiss | Failure | None, fields: Sequence[str]) -> dict[str, Any] | None:
    """Return the event's number and some fields of a result; None without a result."""
    if miss_or_failure is None:
        return None
    return {"event": miss_or_failure.event} | {field: getattr(miss_or_failure, field) for field in fields}


def _show_replays(replays: Sequence[Replay], *, is_other: bool) -> None:
    out = console()
    unit = Unit.for_bytes([result.reserved_peak for result in replays])
    rows = []
    for result in replays:
        sizes = shown(unit, result.reserved_peak_recorded), unit.show(result.reserved_peak)
        exact = f"{result.exact_addresses:,}" if result.follows_record else NOT_KNOWN
        outcome = "fits" if result.failure is None else "out of memory"
        own = (*sizes, outcome) if is_other else (f"{result.allocs:,}", exact, *sizes)
        rows.append((_name(result), *own))
    peaks = (f"most reserved ({unit.name})", "simulated")
    columns = (*peaks, "outcome") if is_other else ("allocations", "same address", *peaks)
    out.print(table(("device", *columns), rows))
    for result in replays:
        for line in _what_if_lines(result) if is_other else _beside_record_lines(result):
            out.print(printable(f"{_name(result)}: {line}"), soft_wrap=True)


def _beside_record_lines(result: Replay) -> Iterator[str]:
    miss = result.first_miss
    if not result.follows_record:
        yield (
            "the recording contains no segments, so addresses cannot be compared, and what was reserved "
            "before the first event is not known."
        )
    elif miss is not None:
        yield (
            f"first difference at event {miss.event}: {miss.bytes:,} bytes at "
            f"{miss.simulated_address:#x}, recorded at {miss.recorded_address:#x}; {miss.cause}."
        )
        if not records_settings(result.source):
            yield (
                "the recording does not contain the allocator's settings; this comparison is with "
                f"{result.settings.conf or 'the default settings'}. Give those of the program with "
                "--alloc-conf."
            )


def _what_if_lines(result: Replay) -> Iterator[str]:
    unit, failure = Unit.for_bytes([result.reserved_peak]), result.failure
    if failure is not None and failure.event < 0:
        yield (
            f"{unit.text(failure.reserved_bytes + failure.requested_bytes)} are needed for the blocks that "
            f"are alive at the start: more than the capacity of {unit.text(result.capacity or 0)}. Nothing "
            "was simulated."
        )
        return
    if failure is not None:
        yield (
            f"out of memory at event {failure.event}: {size_text(failure.requested_bytes)} requested, with "
            f"{unit.text(failure.reserved_bytes)} reserved and {unit.text(failure.live_bytes)} live."
        )
    for event in result.rescued[:1]:
        yield (
            f"the request that failed at event {event} fits here; what the program would "
            "have done next is not known."
        )
    if result.reserved_at_start:
        yield (
            f"{unit.text(result.reserved_at_start)} were reserved before the first event; their layout is "
            "kept as recorded."
        )


def _name(result: Replay) -> str:
    return result.source.devices[result.device].name


MOMENTS = ("peak", "start", "end", "oom")
OOM_LINES = 5


@click.command("allocator")
@click.argument("path", type=SOURCE)
@click.option(
    "--at",
    "moment",
    default="peak",
    show_default=True,
    metavar="EVENT",
    help=(
        "Number of an event of the device, counted from 0, or one of: peak, start, end, oom (the last one)."
    ),
)
@click.option("--device", help="Name of a device. Default: all.")
@click.option(
    "--top",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    help="Number of segments to show; 0: all.",
)
@click.option("--blocks", is_flag=True, help="With --json: list every block of every segment.")
@json_option("Print JSON, with sizes in bytes and times in nanoseconds.")
@simulation_options
@reading_options
def command(
    path: str,
    moment: str,
    device: str | None,
    top: int,
    blocks: bool,
    as_json: bool,
    reading: Reading,
    simulation: Simulation,
) -> None:
    """What the caching allocator holds at a moment, device by device, and why requests failed.

    PATH is a memory snapshot, a Kineto trace, a recorded window, or a recorded run's folder. What a
    file does not tell is shown as ?, and is null in JSON.
    """
    opened = open_trace(path, reading, device=device)
    if simulation.is_wanted:
        simulate(opened, device, simulation, as_json)
        return
    trace = opened.trace
    states = [device_state(trace, row, event) for row, event in _moments(trace, device, moment)]
    for state in states:
        _note_older_ooms(state)
    if as_json:
        document = {
            "source": opened.source,
            "settings": trace.properties,
            "devices": [state_json(state, blocks) for state in states],
        }
        click.echo(json.dumps(document, indent=2))
        return
    for state in states:
        _show(state, top)
    if not states:
        click.echo(f"{printable(opened.source)} has no device: nothing was recorded in it.")


def _note_older_ooms(state: DeviceState) -> None:
    older = state.failed_requests - len(state.ooms)
    if older:
        click.echo(
            f"note: {printable(state.name)}: {older:,} earlier failed requests are not shown.", err=True
        )


def _moments(trace: MemoryTrace, device: str | None, moment: str) -> Iterator[tuple[int, int]]:
    """Yield the row of each device and the event whose state to show.

    Raises:
        NotRecordedError: the trace has no such device or event.
        MemPluginError: `moment` is neither a number nor one of `MOMENTS`.
    """
    rows = trace.device_rows(device)
    if moment == "oom":
        failed = {int(trace.events.device[oom.event]): oom.event for oom in trace.ooms}
        if not failed.keys() & set(rows):
            raise NotRecordedError(
                "This recording has no failed request.",
                where=trace.source,
                fix="Choose another moment with --at.",
            )
        yield from ((row, failed[row]) for row in rows if row in failed)
        return
    for row in rows:
        if moment == "peak":
            yield row, int(trace.live(row).argmax()) - 1
        elif moment == "start":
            yield row, -1
        elif moment == "end":
            yield row, len(trace.events) - 1
        else:
            yield row, _event(trace, moment)


def _event(trace: MemoryTrace, text: str) -> int:
    if not text.lstrip("-").isdecimal() or len(text) > 18:
        raise MemPluginError(
            f"{text[:80]!r} is not a moment.",
            where="--at",
            fix=f"Give a number, or one of: {', '.join(MOMENTS)}.",
        )
    if not -1 <= int(text) < len(trace.events):
        raise NotRecordedError(
            f"The recording has no event {int(text)}.",
            where=trace.source,
            fix=f"Give a number from -1 (before the first event) to {len(trace.events) - 1}.",
        )
    return int(text)


def _show(state: DeviceState, top: int) -> None:
    out = console()
    unit = Unit.for_bytes([state.active_bytes, state.reserved_bytes or 0])
    for line in _heading(state):
        out.print(printable(line), soft_wrap=True)
    out.print(_pools(state, unit))
    if state.segments is None:
        out.print("The file contains no segments, so it is not known where the reserved memory is.\n")
    else:
        out.print(_segments(state, unit, top))
    for oom in state.ooms:
        _show_oom(state, oom)


def _heading(state: DeviceState) -> Iterator[str]:
    waste, peak = state.fragmentation, state.peak
    yield f"{state.name}, after event {state.event}"
    yield (
        f"allocated {_with_unit(state.allocated_bytes)}{_counted(state)}, "
        f"pending {_with_unit(state.pending_bytes)}, reserved {_with_unit(state.reserved_bytes)}"
    )
    if waste.unused is not None:
        yield (
            f"fragmentation: {100 * waste.unused:.1f} % of the reserved memory is not allocated"
            f"{_apart(waste)}"
        )
    yield (
        f"peak {_with_unit(peak.bytes)} at event {peak.event}: "
        f"{_with_unit(peak.before_bytes)} allocated before the recording, "
        f"{_with_unit(peak.came_bytes)} during it; most reserved {_with_unit(state.peak_reserved_bytes)}"
    )


def _counted(state: DeviceState) -> str:
    """Say which sizes are summed: requested sizes or, if the file records only those, whole blocks."""
    if state.rounded_bytes is None:
        return ""
    if state.segments is None and state.rounded_exact:
        return " in whole blocks (requested sizes are not recorded)"
    at_least = "" if state.rounded_exact else "at least "
    return f" as requested ({at_least}{_with_unit(state.rounded_bytes)} rounded)"


def _pools(state: DeviceState, unit: Unit) -> RenderableType:
    columns = {
        f"pool ({unit.name})": [f"{pool.pool}, {pool.stream}" for pool in state.pools],
        "allocated": [unit.show(pool.allocated_bytes) for pool in state.pools],
        "pending": [unit.show(pool.pending_bytes) for pool in state.pools],
        "rounded": [
            NOT_KNOWN
            if state.rounded_bytes is None
            else f"{'' if pool.rounded_exact else '≥ '}{unit.show(pool.rounded_bytes)}"
            for pool in state.pools
        ],
        "reserved": [shown(unit, pool.reserved_bytes) for pool in state.pools],
        "largest free": [shown(unit, pool.largest_free_bytes) for pool in state.pools],
        "segments": [NOT_KNOWN if pool.segments is None else f"{pool.segments:,}" for pool in state.pools],
    }
    if not state.pending_bytes:
        del columns["pending"]
    return table(list(columns), zip(*columns.values(), strict=True))


def _segments(state: DeviceState, unit: Unit, top: int) -> RenderableType:
    """Return a table of the largest segments, with one row for all the others."""
    by_size = sorted(state.segments or (), key=lambda segment: -segment.bytes)
    largest = by_size[: top or None]
    rows = [
        (f"{segment.address:#x} {segment.pool}, {segment.stream}", *_sizes(unit, [segment]))
        for segment in largest
    ]
    rest = by_size[len(largest) :]
    if rest:
        rows.append((f"({len(rest):,} others)", *_sizes(unit, rest)))
    return table((f"segment ({unit.name})", "bytes", "in use", "free", "blocks"), rows)


def _sizes(unit: Unit, segments: Sequence[SegmentState]) -> tuple[str, str, str, str]:
    """Format the bytes of segments: all, in use (live blocks, rounded) and free; and count live blocks."""
    blocks = [block for segment in segments for block in segment.blocks]
    total = sum(segment.bytes for segment in segments)
    free = sum(block.extent_bytes for block in blocks if block.state == "free")
    live = sum(block.state != "free" for block in blocks)
    return unit.show(total), unit.show(total - free), unit.show(free), f"{live:,}"


def _show_oom(state: DeviceState, oom: OomReport) -> None:
    out = console()
    unit = Unit.for_bytes([oom.active_bytes])
    failed = f"out of memory at event {oom.event}"
    out.print(f"{failed}: {printable(oom.why)}", soft_wrap=True)
    parts = top_parts(breakdown(state.trace, state.device, oom.event, "line"), OOM_LINES)
    rows = [(shown_key(part.key), unit.show(part.bytes), f"{part.count:,}") for part in parts]
    out.print(table(("live then, by line", unit.name, "blocks"), rows))


def _with_unit(size: int | None) -> str:
    return NOT_KNOWN if size is None else size_text(size)


def _apart(waste: Fragmentation) -> str:
    """Say how much of the free memory is outside the largest free block, where that is known."""
    if waste.split is None:
        return "; no block is free" if waste.free_bytes == 0 else ""
    return (
        f"; {100 * waste.split:.1f} % of the free memory is outside the largest free block "
        f"({_with_unit(waste.largest_free_bytes)} of {_with_unit(waste.free_bytes)})"
    )


OF_FRAGMENTATION = ("unused", "split", "free_bytes", "largest_free_bytes")
OF_BLOCK = ("address", "state", "bytes", "extent_bytes")
"""The fields that JSON has of each."""


def state_json(state: DeviceState, blocks: bool) -> dict[str, Any]:
    """Return the state of a device's allocator for JSON."""
    return {
        "device": state.name,
        "event": state.event,
        "allocated_bytes": state.allocated_bytes,
        "pending_bytes": state.pending_bytes,
        "active_bytes": state.active_bytes,
        "rounded_bytes": state.rounded_bytes,
        "rounded_exact": state.rounded_exact,
        "reserved_bytes": state.reserved_bytes,
        "peak_reserved_bytes": state.peak_reserved_bytes,
        "peak": {**asdict(state.peak), "event": state.peak.event},
        "fragmentation": {field: getattr(state.fragmentation, field) for field in OF_FRAGMENTATION},
        "pools": [pool_json(pool, state.rounded_bytes is not None) for pool in state.pools],
        "segments": None
        if state.segments is None
        else [segment_json(segment, blocks) for segment in state.segments],
        "free_blocks": [
            {"from_bytes": lowest, "count": count, "bytes": size} for lowest, count, size in state.free_blocks
        ],
        "ooms": [oom_json(oom, oom.event) for oom in state.ooms],
    }


def pool_json(pool: PoolState, rounds: bool = True) -> dict[str, Any]:
    """Return a pool for JSON; `rounded_bytes` is null if the device does not round sizes."""
    document = asdict(pool)
    del document["by_rule_bytes"]
    if not rounds:
        document["rounded_bytes"] = None
    return {**document, "active_bytes": pool.active_bytes, "rounded_exact": pool.rounded_exact}


def segment_json(segment: SegmentState, blocks: bool) -> dict[str, Any]:
    """Return a segment for JSON, with its blocks if `blocks`."""
    free = [block.extent_bytes for block in segment.blocks if block.state == "free"]
    document: dict[str, Any] = {
        "address": segment.address,
        "bytes": segment.bytes,
        "pool": segment.pool,
        "stream": segment.stream,
        "expandable": bool(segment.expandable),
        "active_blocks": len(segment.blocks) - len(free),
        "active_bytes": sum(block.bytes for block in segment.blocks),
        "free_bytes": sum(free),
        "largest_free_bytes": max(free, default=0),
    }
    if blocks:
        document["blocks"] = [
            {field: getattr(block, field) for field in OF_BLOCK} for block in segment.blocks
        ]
    return document


def oom_json(oom: OomReport, event: int) -> dict[str, Any]:
    """Return a failed request for JSON."""
    document = asdict(oom)
    document.update(
        event=event,
        parts=parts_json(oom.parts),
        stacks=parts_json(oom.stacks),
        pools=[pool_json(pool) for pool in oom.pools],
    )
    return document
