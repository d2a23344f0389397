"""`tb-memplugin peak`: what was alive at the peak of a file or of a recorded step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tb_memplugin.analysis.account import Account, account_line, accounts
from tb_memplugin.analysis.divisions import DIVISIONS, By, Chosen, Part
from tb_memplugin.analysis.moments import LiveAllocation, highest_within, moment
from tb_memplugin.analysis.reasons import reason_of
from tb_memplugin.analysis.steps import step_stats
from tb_memplugin.analysis.whole_device import whole_line, whole_of
from tb_memplugin.commands.divisions import division, division_name, division_options, shown_key, top_parts
from tb_memplugin.commands.opening import (
    Reading,
    chosen_steps,
    highest_or_dump,
    load_file,
    peaks,
    print_notes,
    print_others,
    reading_options,
)
from tb_memplugin.commands.options import SOURCE, json_option
from tb_memplugin.commands.ranges import Range, range_options
from tb_memplugin.commands.tables import LONGEST, Unit, percent, printable, show_table
from tb_memplugin.errors import MemPluginError, NotRecordedError, UnreadableFileError
from tb_memplugin.store import files
from tb_memplugin.trace import MemoryTrace, Phase, WholeDevice

if TYPE_CHECKING:
    from tb_memplugin.analysis.oom import OomReport
    from tb_memplugin.store.reader import RecordedStep

LARGEST = 30
"""How many single blocks JSON has at most."""

FIGURES = (
    *("step", "peak_bytes", "window_peak_bytes", "peak_event", "peak_time_ns"),
    *("start_bytes", "end_bytes", "peak_reserved_bytes"),
)
"""The fields of a peak that JSON has as they are, in this order."""


@click.command("peak")
@click.argument("path", type=SOURCE)
@click.option("--step", type=int, help="Number of the step. Default: the step with the highest peak.")
@click.option("--device", help="Name of a device, such as cuda:0. Default: all.")
@click.option("--worker", help="For a folder: name of the worker. Default: the one with the highest peak.")
@division_options
@click.option(
    "--top", type=click.IntRange(min=0), default=10, show_default=True, help="Number of rows; 0: all."
)
@range_options
@json_option("Print JSON, with sizes in bytes and times in nanoseconds.")
@reading_options
def command(
    path: str,
    step: int | None,
    device: str | None,
    worker: str | None,
    by: str | None,
    rules: Sequence[str],
    top: int,
    within: Range,
    as_json: bool,
    reading: Reading,
) -> None:
    """What was alive at the peak, for each device.

    PATH is a memory snapshot, a Kineto trace, a raw memory timeline, a recorded window, a run's folder, a
    worker's folder in it, or a logdir above them.
    """
    chosen = division(by, rules)
    is_folder = files.is_folder(path)
    if not within.is_whole and (is_folder or step is not None):
        raise MemPluginError(
            "A range of time is looked for in one file, in all of its steps.",
            where=path,
            fix="Give the file of a window, without --step.",
        )
    if is_folder:
        source, worker, device_peaks = _of_folder(path, step, device, worker, chosen)
    else:
        if worker is not None:
            raise MemPluginError("A file has no workers.", where="--worker", fix="Leave it out.")
        source, worker = path, Path(path).name
        trace = load_file(path, reading)
        rows = trace.device_rows(device)
        if step is not None:
            trace.step_row(step)
        device_peaks = [
            trace_peak(trace, row, chosen, step)
            if within.is_whole
            else range_peak(trace, row, chosen, within.events(trace, device))
            for row in rows
        ]
    if as_json:
        document = {"source": source, "devices": [_json(peak, top) for peak in device_peaks]}
        click.echo(json.dumps(document, indent=2))
        return
    for peak in device_peaks:
        _show(peak, worker, division_name(chosen), top)
    if not device_peaks:
        click.echo(f"{printable(source)} has no device: nothing was recorded in it.")


def _of_folder(
    path: str, step: int | None, device: str | None, worker: str | None, by: Chosen
) -> tuple[str, str, list[DevicePeak]]:
    """Return the worker's folder, its name, and each device's peak in the step where it is highest."""
    steps = chosen_steps(path, step, device, worker)
    best = highest_or_dump(steps, device)
    traces: dict[str, MemoryTrace | UnreadableFileError] = {}
    device_peaks = [
        _recorded_peak(chosen, name, by, traces) for chosen, name in _per_device(steps, best.folder, device)
    ]
    print_others(steps, best.folder)
    return best.folder, best.metadata.worker, device_peaks


def _per_device(
    steps: Sequence[RecordedStep], folder: str, device: str | None
) -> list[tuple[RecordedStep, str]]:
    """Return, for each device of a worker, the step with its highest peak."""
    own = [step for step in steps if step.folder == folder]
    names = [device] if device else list(dict.fromkeys(name for step in own for name in peaks(step)))
    return [(max(own, key=lambda step: peaks(step).get(name, -1)), name) for name in names]


def _recorded_peak(
    step: RecordedStep, device: str, by: Chosen, traces: dict[str, MemoryTrace | UnreadableFileError]
) -> DevicePeak:
    """Return a peak from the window's side file, or from the summary if the file cannot be used.

    Raises:
        UnreadableFileError: the side file cannot be used, and the summary does not contain the division.
    """
    trace = _window(step, traces)
    if not isinstance(trace, UnreadableFileError):
        try:
            return trace_peak(trace, trace.device_row(device), by, step.metadata.step)
        except NotRecordedError as error:
            trace = UnreadableFileError("The side file belongs to another window.", where=error.where)
    if not isinstance(by, str) or by not in DIVISIONS:
        raise trace
    return summary_peak(step, device, by)


def _window(
    step: RecordedStep, traces: dict[str, MemoryTrace | UnreadableFileError]
) -> MemoryTrace | UnreadableFileError:
    from tb_memplugin.store.reader import load_window

    path = step.side_file or ""
    if path not in traces:
        try:
            traces[path] = trace = load_window(path, step.metadata)
            print_notes(trace, step.folder)
        except UnreadableFileError as error:
            click.echo(f"warning: {printable(error.what)} {printable(path)}", err=True)
            traces[path] = error
    return traces[path]


def _json(peak: DevicePeak, top: int) -> dict[str, Any]:
    from tb_memplugin.exports.json import account_json, parts_json, whole_json

    return {
        "device": peak.device,
        **{field: getattr(peak, field) for field in FIGURES},
        "account": account_json(peak.accounts),
        "whole_device": whole_json(peak.whole_devices, peak.device),
        "oom": _oom_json(peak),
        "breakdown": parts_json(top_parts(peak.parts, top)),
        "largest": [_block_json(block) for block in peak.largest[: top or None]],
    }


def _block_json(block: LiveAllocation) -> dict[str, Any]:
    fields = (
        *("bytes", "address", "module", "operator", "name", "tensor", "born_ns", "freed_ns"),
        "module_confidence",
    )
    return {
        **{field: getattr(block, field) for field in fields},
        "category": block.category.key,
        "phase": block.phase.key,
        "why": reason_of(block),
    }


def _oom_json(peak: DevicePeak) -> dict[str, Any] | None:
    oom = peak.oom
    if oom is None:
        return None
    sizes = ("requested_bytes", "free_bytes", "active_bytes", "reserved_bytes", "largest_free_bytes")
    return {
        **{field: getattr(oom, field) for field in ("event", "time_ns", *sizes, "cause", "why")},
        "failed_requests": peak.failed_requests,
    }


def _show(peak: DevicePeak, worker: str, by: str, top: int) -> None:
    unit = Unit.for_bytes([peak.peak_bytes])
    parts = top_parts(peak.parts, top)
    total = Part("total", sum(part.bytes for part in parts), sum(part.count for part in parts))
    rows = [
        (shown_key(part.key), unit.show(part.bytes), percent(part.bytes, peak.peak_bytes), f"{part.count:,}")
        for part in (*parts, total)
    ]
    for line in _heading(peak, worker, unit):
        click.echo(printable(line, None if line.startswith("out of memory") else LONGEST))
    account = account_line(peak.accounts)
    color = "red" if account.level == "different" else None
    click.secho(printable(f"account of the window: {account.text}"), fg=color)
    whole_text = whole_line(peak.whole_devices, peak.device)
    if whole_text is not None:
        click.echo(printable(whole_text, None))
    show_table((by, unit.name, "%", "blocks"), rows)


def _heading(peak: DevicePeak, worker: str, unit: Unit) -> list[str]:
    doing = peak.phase.key + (f", {peak.operator}" if peak.operator is not None else "")
    seconds = (peak.peak_time_ns - peak.step_start_ns) / 1e9
    at = f", {seconds:.3f} s into the step ({doing})"
    if peak.peak_event == -1:
        at = ", before the first event"
    elif peak.peak_event is not None:
        at += f", at event {peak.peak_event}"
    start, end = ("range", "range") if peak.is_range else ("window", "step")
    lines = [
        f"{worker}, step {peak.step}, {peak.device}",
        f"peak {unit.text(peak.peak_bytes)}{at}",
        f"start of the {start} {unit.text(peak.start_bytes)}, end of the {end} {unit.text(peak.end_bytes)}",
    ]
    if peak.oom is not None:
        lines.append(f"out of memory at event {peak.oom.event}: {peak.oom.why}")
    return lines


@dataclass(frozen=True, slots=True)
class DevicePeak:
    """A device's peak in a step. Bytes; epoch nanoseconds.

    `peak_time_ns` and `peak_event` are when the peak was first reached; the event is None if there is only a
    summary. `parts` and `largest`, the largest blocks, are those of that moment, `accounts` those of the
    whole window, and `whole_devices` what filled the whole device in it. `oom` is the last request that
    failed on the device, of `failed_requests` in all. With `is_range`, start, end, peaks and failed requests
    are those of a range of events in place of a step.
    """

    device: str
    step: int
    peak_bytes: int
    window_peak_bytes: int
    peak_event: int | None
    peak_time_ns: int
    step_start_ns: int
    start_bytes: int
    end_bytes: int
    peak_reserved_bytes: int | None
    phase: Phase
    operator: str | None
    parts: tuple[Part, ...]
    oom: OomReport | None = None
    failed_requests: int = 0
    largest: tuple[LiveAllocation, ...] = ()
    accounts: tuple[Account, ...] = ()
    whole_devices: tuple[WholeDevice, ...] = ()
    is_range: bool = False


def trace_peak(trace: MemoryTrace, device: int, by: Chosen, step: int | None = None) -> DevicePeak:
    """Return a device's peak in a step.

    Args:
        step: the step's number; None takes the step with the highest peak.

    Raises:
        NotRecordedError: the trace has no such step.
    """
    steps = step_stats(trace, device)
    highest = max(steps, key=lambda stats: stats.peak_bytes)
    stats = highest if step is None else steps[trace.step_row(step)]
    figures = {name: getattr(stats, name) for name in FIGURES}
    return _device_peak(
        trace, device, by, (0, len(trace.events)), **figures, step_start_ns=stats.start_ns, is_range=False
    )


def range_peak(trace: MemoryTrace, device: int, by: Chosen, within: tuple[int, int]) -> DevicePeak:
    """Return a device's peak in a range of events, the moment before it included."""
    first, last = within
    size, event = highest_within(trace, device, within)
    step, levels = trace.step_at(event), slice(first, last + 2)
    live, reserved = trace.live(device), trace.reserved(device)
    return _device_peak(
        trace,
        device,
        by,
        within,
        step=step.number,
        peak_bytes=size,
        window_peak_bytes=int(trace.window(device)[levels].max()),
        peak_event=event,
        peak_time_ns=trace.time_of(event),
        step_start_ns=step.start_ns,
        start_bytes=int(live[first]),
        end_bytes=int(live[last + 1]),
        peak_reserved_bytes=None if reserved is None else int(reserved[levels].max()),
        is_range=True,
    )


def _device_peak(
    trace: MemoryTrace, device: int, by: Chosen, within: tuple[int, int], *, peak_event: int, **figures: Any
) -> DevicePeak:
    """Return a peak with these figures, what was alive then, and the requests that failed in a range."""
    state = moment(trace, device, peak_event, largest=LARGEST)
    failed, oom = _failed_requests(trace, device, within)
    return DevicePeak(
        device=trace.devices[device].name,
        peak_event=peak_event,
        phase=state.phase,
        operator=state.operator,
        parts=state.parts(by),
        oom=oom,
        failed_requests=failed,
        largest=state.largest,
        accounts=accounts(trace, device),
        whole_devices=whole_of(trace, device),
        **figures,
    )


def _failed_requests(
    trace: MemoryTrace, device: int, within: tuple[int, int]
) -> tuple[int, OomReport | None]:
    """Return how many requests failed on a device in a range of events, and the report of the last."""
    if not trace.ooms:
        return 0, None
    from tb_memplugin.analysis.oom import failed_requests, oom_report  # most recordings need none of it

    first, last = within
    failed = [row for row in failed_requests(trace, device) if first <= trace.ooms[row].event <= last]
    return len(failed), oom_report(trace, failed[-1]) if failed else None


def summary_peak(step: RecordedStep, device: str, by: By) -> DevicePeak:
    """Return a device's peak from the summary of a recorded step.

    Args:
        by: one of `DIVISIONS`; summaries contain no others.

    Raises:
        UnreadableFileError: the summary is damaged, or newer than this reader.
    """
    from tb_memplugin.store.reader import (
        full_summary,
        largest_at_peak,
        peak_parts,
        recorded_accounts,
        recorded_whole,
    )

    summary, metadata = full_summary(step), step.metadata
    device_summary = next(candidate for candidate in summary.devices if candidate.name == device)
    stats = device_summary.stats
    return DevicePeak(
        device=device,
        step=metadata.step,
        peak_bytes=stats.peak_bytes,
        window_peak_bytes=stats.window_peak_bytes,
        peak_event=None,
        peak_time_ns=metadata.epoch_ns + stats.peak_time_ns,
        step_start_ns=metadata.epoch_ns + stats.step_start_ns,
        start_bytes=stats.start_bytes,
        end_bytes=stats.end_bytes,
        peak_reserved_bytes=stats.peak_reserved_bytes if stats.HasField("peak_reserved_bytes") else None,
        phase=Phase(device_summary.peak.phase),
        operator=device_summary.peak.operator if device_summary.peak.HasField("operator") else None,
        parts=tuple(peak_parts(summary, device_summary, by)),
        largest=tuple(largest_at_peak(summary, device_summary)),
        accounts=recorded_accounts(device_summary),
        whole_devices=recorded_whole(device_summary),
    )
