"""The peak of one device, from a trace or, if there is nothing else, from a recorded summary."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tb_memplugin.analysis.account import Account, accounts
from tb_memplugin.analysis.divisions import By, Part
from tb_memplugin.analysis.moments import LiveAllocation, moment
from tb_memplugin.analysis.oom import OomReport, failed_requests, oom_report
from tb_memplugin.analysis.rules import Rules
from tb_memplugin.analysis.steps import StepStats, step_stats
from tb_memplugin.commands.event_numbers import own_number
from tb_memplugin.store.reader import (
    RecordedStep,
    full_summary,
    largest_at_peak,
    peak_parts,
    recorded_accounts,
)
from tb_memplugin.trace import MemoryTrace, Phase


@dataclass(frozen=True, slots=True)
class DevicePeak:
    """A device's peak in a step. Bytes; epoch nanoseconds.

    `peak_time_ns` and `reached_event` are when the peak was first reached. `peak_event` is an event after
    which live bytes were at the peak; the parts are those of that moment. `again` is True if live bytes fell
    between the two. Events are counted on the device, like the entries of a snapshot; they are None if
    there is only a summary. `largest` are the largest blocks alive at the shown event, `accounts` those of
    the whole window. `oom` is the last request that failed on the device, of `failed_requests` in all.
    """

    device: str
    step: int
    peak_bytes: int
    window_peak_bytes: int
    reached_event: int | None
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
    oom_event: int | None = None
    failed_requests: int = 0
    again: bool = False
    largest: tuple[LiveAllocation, ...] = ()
    accounts: tuple[Account, ...] = ()


def trace_peak(
    trace: MemoryTrace, device: int, by: By | Rules, step: int | None = None, *, last: bool, largest: int = 0
) -> DevicePeak:
    """Return a device's peak in a step.

    Args:
        trace: any trace.
        device: row in `trace.devices`.
        by: what to divide by.
        step: the step's number; None takes the step with the highest peak.
        last: show the last event after which live bytes are at the peak, else the first.
        largest: how many of the largest blocks alive then to list.

    Raises:
        NotRecordedError: the trace has no such step.
    """
    steps = step_stats(trace, device)
    highest = max(steps, key=lambda stats: stats.peak_bytes)
    stats = highest if step is None else steps[trace.step_row(step)]
    reached = moment(trace, device, stats.peak_event, largest=0)
    shown = _last_at_peak(trace, device, stats) if last else stats.peak_event
    state = moment(trace, device, shown, largest=largest)
    between = trace.live(device)[stats.peak_event + 1 : shown + 2]
    failed = failed_requests(trace, device)
    oom = oom_report(trace, failed[-1]) if failed else None
    return DevicePeak(
        device=trace.devices[device].name,
        step=stats.step,
        peak_bytes=stats.peak_bytes,
        window_peak_bytes=stats.window_peak_bytes,
        reached_event=own_number(trace, device, stats.peak_event),
        peak_event=own_number(trace, device, shown),
        peak_time_ns=stats.peak_time_ns,
        step_start_ns=stats.start_ns,
        start_bytes=stats.start_bytes,
        end_bytes=stats.end_bytes,
        peak_reserved_bytes=stats.peak_reserved_bytes,
        phase=reached.phase,
        operator=reached.operator,
        parts=state.parts(by),
        oom=oom,
        oom_event=own_number(trace, device, oom.event) if oom else None,
        failed_requests=len(failed),
        again=bool((between < stats.peak_bytes).any()),
        largest=state.largest,
        accounts=accounts(trace, device),
    )


def _last_at_peak(trace: MemoryTrace, device: int, stats: StepStats) -> int:
    """Return the last event of a step after which the device is at its peak."""
    first, end = trace.step_events(trace.step_row(stats.step))
    level = trace.live(device)[first : end + 1]
    return first - 1 + int(np.flatnonzero(level == stats.peak_bytes)[-1])


def summary_peak(step: RecordedStep, device: str, by: By) -> DevicePeak:
    """Return a device's peak from the summary of a recorded step.

    Args:
        step: a recorded step that has the device.
        device: the device's name.
        by: one of `DIVISIONS`; summaries contain no others.

    Raises:
        UnreadableFileError: the summary is damaged, or newer than this reader.
    """
    summary, metadata = full_summary(step), step.metadata
    device_summary = next(candidate for candidate in summary.devices if candidate.name == device)
    stats = device_summary.stats
    return DevicePeak(
        device=device,
        step=metadata.step,
        peak_bytes=stats.peak_bytes,
        window_peak_bytes=stats.window_peak_bytes,
        reached_event=None,
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
    )
