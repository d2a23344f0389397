"""`tb-memplugin allocator --replay | --alloc-conf | --capacity`: replay a recording in the simulator."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import click

from tb_memplugin.analysis.units import read_size, size_text
from tb_memplugin.commands.export import refuse_own_input
from tb_memplugin.commands.opening import Opened
from tb_memplugin.commands.options import PATH
from tb_memplugin.commands.ranges import own_number
from tb_memplugin.commands.tables import NOT_KNOWN, Unit, console, printable, shown, table
from tb_memplugin.errors import MemPluginError
from tb_memplugin.estimate import AllocatorSettings, FirstMiss, Replay, replay, simulated_trace
from tb_memplugin.exports import snapshot
from tb_memplugin.exports.output import STDOUT
from tb_memplugin.simulator.allocator_settings import not_followed, records_settings
from tb_memplugin.simulator.replay_run import Failure


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
        _show(replays, is_other=simulation.is_other)


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
        "first_miss": _at(result, result.first_miss, fields),
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
        "failure": _at(result, result.failure, fields),
        "recorded_failures_that_fit": [_number(result, event) for event in result.rescued],
        "allocs": result.allocs,
        "reserved_peak_recorded": result.reserved_peak_recorded,
        "reserved_peak_simulated": result.reserved_peak,
    }


def _at(
    result: Replay, miss_or_failure: FirstMiss | Failure | None, fields: Sequence[str]
) -> dict[str, Any] | None:
    """Return the event's number and some fields of a result; None without a result."""
    if miss_or_failure is None:
        return None
    return {"event": _number(result, miss_or_failure.event)} | {
        field: getattr(miss_or_failure, field) for field in fields
    }


def _show(replays: Sequence[Replay], *, is_other: bool) -> None:
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
            f"first difference at event {_number(result, miss.event)}: {miss.bytes:,} bytes at "
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
            f"out of memory at event {_number(result, failure.event)}: {size_text(failure.requested_bytes)} "
            f"requested, with {unit.text(failure.reserved_bytes)} reserved and "
            f"{unit.text(failure.live_bytes)} live."
        )
    for event in result.rescued[:1]:
        yield (
            f"the request that failed at event {_number(result, event)} fits here; what the program would "
            "have done next is not known."
        )
    if result.reserved_at_start:
        yield (
            f"{unit.text(result.reserved_at_start)} were reserved before the first event; their layout is "
            "kept as recorded."
        )


def _name(result: Replay) -> str:
    return result.source.devices[result.device].name


def _number(result: Replay, event: int) -> int:
    return own_number(result.source, result.device, event)
