"""`step`: the data of the Overview."""

from __future__ import annotations

from typing import TypedDict

from tb_memplugin.analysis.growth import compares_windows
from tb_memplugin.exports.json import AccountJson, WholeJson, account_json, whole_json
from tb_memplugin.proto import recording_pb2
from tb_memplugin.proto.recording_pb2 import DeviceSummary, StepSummary
from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Chosen, Session
from tb_memplugin.server.shapes import (
    Allocation,
    Note,
    Part,
    StepStats,
    allocation_shape,
    parts_shape,
    stats_shape,
)
from tb_memplugin.store.reader import largest_at_peak, peak_parts, recorded_accounts, recorded_whole
from tb_memplugin.trace import Phase
from tb_memplugin.trace.notes import OTHER


class StepPeak(TypedDict):
    """What is alive at the peak."""

    bytes: int
    """The peak."""
    time_ns: int
    event: int
    """When it is."""
    phase: str
    operator: str | None
    module: str | None
    """What ran."""
    by_category: list[Part]
    by_module: list[Part]
    by_operator: list[Part]
    by_phase: list[Part]
    """What is in it, largest first."""
    largest: list[Allocation]
    """The largest allocations."""


class FirstEnd(TypedDict):
    """What the first comparable step left alive."""

    step: int
    """Its number."""
    end_bytes: int
    """Alive at its end."""


class StepSource(TypedDict):
    """Where a step comes from."""

    kind: str
    """What recorded it."""
    torch: str | None
    """The version of torch."""
    properties: dict[str, str]
    """The allocator's settings, and other properties of the recording."""
    product: str
    """The device's name."""
    side_file: str
    """The path of the side file in the logdir."""
    side_file_present: bool
    """Whether it exists."""
    window: int
    """The number of the window."""
    epoch_ns: str
    """When the window began, in nanoseconds since 1970."""


class StepAnswer(TypedDict):
    """A step, and what is in its peak."""

    run: str
    worker: str
    """As picked."""
    step: int
    """As picked."""
    device: str
    """As picked."""
    stats: StepStats
    """The figures of the step."""
    peak: StepPeak
    """What is alive at the peak."""
    account: AccountJson
    """The window's bytes on the device beside those of a counter of others, [as in the JSON of a
    trace](json_format.md#account)."""
    whole_device: WholeJson | None
    """What filled the whole device in the window, or null,
    [as in the JSON of a trace](json_format.md#whole_device)."""
    notes: list[Note]
    """What is not exact, and why."""
    first_end: FirstEnd | None
    """What the first comparable step left alive. Null if that is this step. On the CPU, only steps of the
    same window are comparable, unless the source counts everything that is alive."""
    source: StepSource
    """Where the step comes from."""


def answer(session: Session, request: Request) -> StepAnswer:
    """Answer from the summary only; the side file is not needed."""
    chosen = session.chosen(request)
    summary, device = session.device_summary(request, chosen)
    metadata = chosen.entry.metadata
    present = session.windows.present(chosen.entry)
    notes = [_note_shape(note) for note in summary.notes]
    if not present:
        text = f"The side file {session.windows.display(chosen.entry)} is missing: the timeline is coarse."
        notes.insert(0, _note_shape(recording_pb2.Note(warning=True, text=text, code="no_side_file")))
    return {
        "run": chosen.entry.run,
        "worker": chosen.entry.worker,
        "step": metadata.step,
        "device": chosen.device,
        "stats": next(stats_shape(stats) for stats in metadata.devices if stats.device == chosen.device),
        "peak": _peak_shape(summary, device),
        "account": account_json(recorded_accounts(device)),
        "whole_device": whole_json(recorded_whole(device), device.name),
        "notes": notes,
        "first_end": _first_end(session, request, chosen, summary.source),
        "source": {
            "kind": summary.source,
            "torch": summary.properties.get("torch"),
            "properties": dict(summary.properties),
            "product": device.product,
            "side_file": session.windows.display(chosen.entry),
            "side_file_present": present,
            "window": metadata.window,
            "epoch_ns": str(metadata.epoch_ns),
        },
    }


def _note_shape(note: recording_pb2.Note) -> Note:
    return {
        "code": note.code or OTHER,
        "level": "warning" if note.warning else "info",
        "bytes": note.bytes if note.HasField("bytes") else None,
        "device": note.device,
        "text": note.text,
    }


def _peak_shape(summary: StepSummary, device: DeviceSummary) -> StepPeak:
    peak = device.peak
    return {
        "bytes": peak.bytes,
        "time_ns": peak.time_ns,
        "event": peak.event,
        "phase": Phase(peak.phase).key,
        "operator": peak.operator if peak.HasField("operator") else None,
        "module": peak.module if peak.HasField("module") else None,
        "by_category": parts_shape(peak_parts(summary, device, "category")),
        "by_module": parts_shape(peak_parts(summary, device, "module")),
        "by_operator": parts_shape(peak_parts(summary, device, "operator")),
        "by_phase": parts_shape(peak_parts(summary, device, "phase")),
        "largest": [
            allocation_shape(block, summary.metadata.epoch_ns) for block in largest_at_peak(summary, device)
        ],
    }


def _first_end(session: Session, request: Request, chosen: Chosen, source: str) -> FirstEnd | None:
    """Return what the first comparable step left alive; None if that is this step.

    A comparable step is of the same recording. If the source does not count everything alive when a window
    begins, it must also be of the same window.
    """
    metadata = chosen.entry.metadata
    across = compares_windows(chosen.device, source)
    for entry in session.catalog.worker(request.ctx, request.experiment, chosen.entry):
        other = entry.metadata
        if entry.tag == chosen.entry.tag:
            return None
        if other.writer_id != metadata.writer_id or not (across or other.window == metadata.window):
            continue
        for device in other.devices:
            if device.device == chosen.device:
                return {"step": other.step, "end_bytes": device.stats.end_bytes}
    return None
