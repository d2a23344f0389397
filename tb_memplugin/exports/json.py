"""JSON: the whole trace with its tables and the peak of each device. Schema: docs/json_format.md."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any, TypedDict

import numpy as np

from tb_memplugin.analysis.account import Account, AccountLevel, account_line, accounts
from tb_memplugin.analysis.divisions import By, Part, breakdown
from tb_memplugin.analysis.whole_device import moment_text, part_name, whole_name, whole_of
from tb_memplugin.exports.output import replacing, written_by
from tb_memplugin.trace import Category, Kind, MemoryTrace, Phase, Reason, Spans, Step, WholeDevice
from tb_memplugin.trace.result import json_value

FORMAT = "tb_memplugin.trace"
VERSION = 1

AT_THE_PEAK: tuple[By, ...] = (
    *("category", "phase", "module", "operator", "annotation", "line", "dtype", "subcategory"),
)
"""The divisions in which each device's peak is written."""

TIMES = ("time_ns", "start_ns", "end_ns")

PHASES = [phase.key for phase in Phase]
"""The name of each phase, by its number."""


def write(trace: MemoryTrace, path: str | os.PathLike[str]) -> None:
    """Write the trace, one column per line.

    Raises:
        MemPluginError: the file cannot be written.
    """
    with replacing(path) as stream:
        for text in _document(trace):
            stream.write(text.encode("ascii"))


def _document(trace: MemoryTrace) -> Iterator[str]:
    """Yield the document in pieces, one large column at a time, so that not all are in memory as text."""
    yield "{\n"
    for name, value in _head(trace).items():
        yield f"{_text(name)}: {_text(value)},\n"
    epoch = trace.first_time_ns
    yield '"tables": {\n' + ",\n".join(f"{_text(k)}: {_text(v)}" for k, v in _tables(trace).items()) + "},\n"
    for name in ("start", "segments", "annotations", "phases", "calls"):
        yield from _columns(name, getattr(trace, name), epoch)
        yield ",\n"
    yield '"allocations": {\n"born": ' + _text(trace.allocations.born)
    yield ',\n"freed": ' + _text(trace.allocations.freed) + "},\n"
    yield from _columns("events", trace.events, epoch)
    yield "\n}\n"


def _head(trace: MemoryTrace) -> dict[str, Any]:
    epoch = trace.first_time_ns
    return {
        "format": FORMAT,
        "version": VERSION,
        "written_by": written_by(),
        "source": trace.source,
        "epoch_ns": str(epoch),
        "times_known": trace.times_are_known,
        "notes": list(trace.notes),
        "properties": dict(trace.properties),
        "devices": [_device(trace, row, epoch) for row in range(len(trace.devices))],
        "steps": [
            {"number": step.number, "start_ns": step.start_ns - epoch, "end_ns": step.end_ns - epoch}
            for step in trace.steps
        ],
        "ooms": [
            {
                "event": oom.event,
                "device": trace.devices[int(trace.events.device[oom.event])].name,
                "requested_bytes": oom.requested_bytes,
                "free_bytes": oom.free_bytes,
            }
            for oom in trace.ooms
        ],
    }


def _device(trace: MemoryTrace, row: int, epoch: int) -> dict[str, Any]:
    device, live = trace.devices[row], trace.live(row)
    event = int(np.argmax(live)) - 1
    reserved = trace.reserved(row)
    return {
        "name": device.name,
        "product": device.product,
        "capacity_bytes": device.capacity,
        "reserved_at_start_bytes": device.reserved_at_start,
        "peak_reserved_bytes": None if reserved is None else int(reserved.max()),
        "start_bytes": int(live[0]),
        "end_bytes": int(live[-1]),
        "peak_bytes": int(live[event + 1]),
        "peak_event": event,
        "peak_time_ns": int(trace.events.time_ns[event]) - epoch if event >= 0 else None,
        "account": account_json(accounts(trace, row)),
        "whole_device": whole_json(whole_of(trace, row), device.name),
        "at_peak": {by: parts_json(breakdown(trace, row, event, by)) for by in AT_THE_PEAK},
    }


class CauseJson(TypedDict):
    """A known cause of a difference."""

    cause: str
    """Its name."""
    bytes: int
    """Positive where the recording has fewer."""


class AccountMoment(TypedDict):
    """A device's live bytes at a moment of a window, by the recording and by a counter."""

    moment: str
    """`start`, `peak` or `end` of the window. At the peak, each side has its own highest value."""
    counted_bytes: int
    """By the recording."""
    counter: str
    """What counted the others."""
    allocator_bytes: int | None
    """By that counter; null if it knows only causes."""
    at_least: bool
    """Whether these may have been more."""
    missing_bytes: int | None
    """What the recording lacks, or null."""
    causes: list[CauseJson]
    """Known differences."""


class AccountJson(TypedDict):
    """A window's bytes on a device beside those of a counter of others."""

    level: AccountLevel
    text: str
    """How they agree, as a word and as a sentence."""
    moments: list[AccountMoment]
    """What was compared."""


def account_json(of_device: Sequence[Account]) -> AccountJson:
    """Return the account of a device for JSON."""
    line = account_line(of_device)
    return {
        "level": line.level,
        "text": line.text,
        "moments": [
            {
                "moment": account.moment.key,
                "counted_bytes": account.counted,
                "counter": account.counter.key,
                "allocator_bytes": account.allocator,
                "at_least": account.at_least,
                "missing_bytes": account.missing,
                "causes": [{"cause": cause.key, "bytes": size} for cause, size in account.causes],
            }
            for account in of_device
        ],
    }


class WholePart(TypedDict):
    """A part of a whole device."""

    part: str
    """Its name."""
    text: str
    """The same in words."""
    bytes: int
    """Of `unknown`, negative where bytes were counted twice."""


class WholeMoment(TypedDict):
    """What fills a whole device at a moment of a window."""

    moment: str
    """`start`, `peak` or `end` of the window."""
    read_at: str
    """When what is not PyTorch's was read: the same, or the nearest reading."""
    text: str
    """The same in words."""
    total_bytes: int
    """The whole."""
    parts: list[WholePart]
    """They sum to the whole."""


class WholeJson(TypedDict):
    """What fills a whole device, PyTorch and others; for the CPU, the machine or the cgroup's limit."""

    name: str
    """What the whole is."""
    moments: list[WholeMoment]
    """The moments that were read."""


def whole_json(of_device: Sequence[WholeDevice], device: str) -> WholeJson | None:
    """Return what fills a whole device for JSON; None if nothing was read."""
    if not of_device:
        return None
    return {
        "name": whole_name(of_device[0], device),
        "moments": [
            {
                "moment": reading.moment.key,
                "read_at": reading.read_at.key,
                "text": moment_text(reading),
                "total_bytes": reading.total,
                "parts": [
                    {"part": part.key, "text": part_name(part, reading), "bytes": size}
                    for part, size in reading.parts
                ],
            }
            for reading in of_device
        ],
    }


class Span(TypedDict):
    """Something that ran."""

    start_ns: int
    end_ns: int
    """When it ran. Over events: the first event within it, and the one after its last."""
    name: str
    """What ran."""
    phase: str | None
    """Or null."""


def step_json(step: Step, name: str, epoch_ns: int) -> Span:
    """Return a step for JSON; times are nanoseconds since `epoch_ns`."""
    start, end = step.start_ns - epoch_ns, step.end_ns - epoch_ns
    return {"start_ns": start, "end_ns": end, "name": name, "phase": None}


def spans_json(spans: Spans, names: Sequence[str], epoch_ns: int) -> list[Span]:
    """Return spans for JSON, with the names of a table; times are nanoseconds since `epoch_ns`."""
    columns = (spans.start_ns.tolist(), spans.end_ns.tolist(), spans.name.tolist(), spans.phase.tolist())
    return [
        {"start_ns": start - epoch_ns, "end_ns": end - epoch_ns, "name": names[name], "phase": PHASES[phase]}
        for start, end, name, phase in zip(*columns, strict=True)
    ]


def parts_json(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Return parts for JSON."""
    return [{"key": part.key, "bytes": part.bytes, "count": part.count} for part in parts]


def _tables(trace: MemoryTrace) -> dict[str, Any]:
    return {
        "kinds": [kind.name.lower() for kind in Kind],
        "categories": [category.key for category in Category],
        "phases": PHASES,
        "reasons": [reason.name.lower() for reason in Reason],
        "operators": trace.operators,
        "modules": trace.modules,
        "labels": trace.labels,
        "tensors": [tensor._asdict() for tensor in trace.tensors],
        "annotation_names": trace.annotation_names,
        "contexts": trace.contexts,
        "streams": trace.streams,
        "pools": trace.pools,
        "stacks": trace.stacks,
    }


def _columns(name: str, table: Any, epoch: int) -> Iterator[str]:
    yield f"{_text(name)}: {{\n"
    for number, field in enumerate(column.name for column in fields(table)):
        values = getattr(table, field)
        shifted = values - epoch if field in TIMES else values
        yield f"{',' if number else ''}{_text(field)}: {_text(shifted)}\n"
    yield "}"


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False, default=json_value)
