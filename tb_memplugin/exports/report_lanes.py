"""The lanes under the report's curve: steps, phases and module calls, or annotations if there are none."""

from __future__ import annotations

from typing import Any

from tb_memplugin.analysis.annotations import annotation_ranges
from tb_memplugin.analysis.lanes import lanes
from tb_memplugin.exports.recorded import times_are_known
from tb_memplugin.trace import MemoryTrace, Phase, Spans, Step

Json = dict[str, Any]

COLUMNS = 8_000
"""Ranges shorter than the whole divided by this are left out and counted as `omitted`."""


def lanes_of(trace: MemoryTrace, device: int, epoch: int) -> Json | None:
    """Return lanes in the form of docs/http_api.md, in nanoseconds since `epoch`; None without times.

    If annotations are shown instead of modules, `label` is "annotations". A single step without phases and
    calls is no lane, but `t0` and `t1` are still its own, so that times on the page count from its start.
    """
    if len(trace.phases) or len(trace.calls) or len(trace.steps) > 1:
        return _of_steps(trace, epoch)
    if not times_are_known(trace):
        return None
    return _of_annotations(trace, device, epoch) or {**_of_steps(trace, epoch), "steps": []}


def _of_steps(trace: MemoryTrace, epoch: int) -> Json:
    t0, t1 = trace.steps[0].start_ns, max(trace.steps[-1].end_ns, trace.steps[0].start_ns + 1)
    shown = lanes(trace.steps, trace.phases, trace.calls, trace.modules, t0, t1, COLUMNS)
    modules = [module.key for module in trace.modules]
    phases = {int(phase): phase.key for phase in Phase}
    return {
        "t0": t0 - epoch,
        "t1": t1 - epoch,
        "steps": [_step(step, epoch) for step in shown.steps],
        "phases": _spans(shown.phases, phases, epoch),
        "modules": [_spans(level, modules, epoch) for level in shown.modules],
        "omitted": shown.omitted,
    }


def _of_annotations(trace: MemoryTrace, device: int, epoch: int) -> Json | None:
    """Place each range in the lane of its depth, or in the next free one below."""
    ranges = annotation_ranges(trace, device)
    times = [*trace.events.time_ns[[0, -1]].tolist(), *trace.annotations.time_ns[-1:].tolist()]
    if not ranges:
        return None
    first, last = min(times) - epoch, max(times) - epoch
    rows: list[list[Json]] = []
    omitted = 0
    for annotation in ranges:
        start = first if annotation.start_ns is None else annotation.start_ns - epoch
        end = last if annotation.end_ns is None else annotation.end_ns - epoch
        if (end - start) * COLUMNS < last - first or end <= start:
            omitted += 1
            continue
        lane = annotation.depth
        while lane < len(rows) and rows[lane] and rows[lane][-1]["end_ns"] > start:
            lane += 1
        rows += [[] for _ in range(len(rows), lane + 1)]
        rows[lane].append({"start_ns": start, "end_ns": end, "name": annotation.name, "phase": None})
    levels = [row for row in rows if row]
    return {
        "t0": first,
        "t1": max(last, first + 1),
        "steps": [],
        "phases": [],
        "modules": levels,
        "label": "annotations",
        "omitted": omitted,
    }


def _step(step: Step, epoch: int) -> Json:
    return {
        "start_ns": step.start_ns - epoch,
        "end_ns": step.end_ns - epoch,
        "name": f"step {step.number}",
        "phase": None,
    }


def _spans(spans: Spans, names: list[str] | dict[int, str], epoch: int) -> list[Json]:
    columns = (spans.start_ns.tolist(), spans.end_ns.tolist(), spans.name.tolist(), spans.phase.tolist())
    return [
        {"start_ns": start - epoch, "end_ns": end - epoch, "name": names[name], "phase": Phase(phase).key}
        for start, end, name, phase in zip(*columns, strict=True)
    ]
