"""`lanes`: the steps, phases and module calls that ran in a stretch of the curve."""

from __future__ import annotations

import numpy as np

from tb_memplugin.analysis.lanes import Ran, lanes, over_events, what_ran
from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.exports.json import PHASES, Span, spans_json, step_json
from tb_memplugin.proto import recording_pb2
from tb_memplugin.server.cache import RESULTS
from tb_memplugin.server.selection import MOST_COLUMNS, Request
from tb_memplugin.server.session import Chosen, Session
from tb_memplugin.server.stretch import OfStretch, Stretch, requested_axis, stretch, stretch_within
from tb_memplugin.trace import MemoryTrace, Module, Spans, Step

DEFAULT_COLUMNS = 1_000


class LanesAnswer(OfStretch):
    """What ran during a stretch."""

    steps: list[Span]
    phases: list[Span]
    """In order of time."""
    modules: list[list[Span]]
    """Calls for each depth, outermost first."""
    omitted: int
    """How many module calls are too narrow to be sent. Calls without any event are not counted."""


def answer(session: Session, request: Request) -> LanesAnswer:
    """Answer from the side file; without it, with the longest calls, which the summary contains."""
    chosen = session.chosen(request)
    columns = request.number("px", DEFAULT_COLUMNS, 1, MOST_COLUMNS)
    try:
        opened = session.opened(chosen)
    except UnreadableFileError:
        if requested_axis(request) == "event":
            raise
        summary, device = session.device_summary(request, chosen)
        modules = tuple(Module(key) for key in summary.modules.keys)
        part = stretch_within(request, "time", device.curve.t0_ns, device.curve.t1_ns)
        phases, calls = _spans(summary.phases, chosen), _spans(summary.calls, chosen)
        ran = what_ran((_step(chosen),), phases, calls, modules)
    else:
        modules = opened.trace.modules
        part = stretch(request, opened)
        ran = _ran(opened.trace, part)
    epoch = chosen.epoch_ns if part.over == "time" else 0
    keys = [module.key for module in modules]
    shown = lanes(ran, part.t0 + epoch, part.t1 + epoch, columns)
    return {
        **part.shape(),
        "steps": [step_json(step, f"Step {step.number}", epoch) for step in shown.steps],
        "phases": spans_json(shown.phases, PHASES, epoch),
        "modules": [spans_json(level, keys, epoch) for level in shown.modules],
        "omitted": shown.omitted,
    }


def _ran(trace: MemoryTrace, part: Stretch) -> Ran:
    def compute() -> Ran:
        is_time = part.over == "time"
        spans = (trace.steps, trace.phases, trace.calls) if is_time else over_events(trace)
        return what_ran(*spans, trace.modules)

    return RESULTS.of_window(trace, ("ran", part.over), compute)


def _step(chosen: Chosen) -> Step:
    stats = next(device.stats for device in chosen.entry.metadata.devices if device.device == chosen.device)
    start, end = stats.step_start_ns + chosen.epoch_ns, stats.step_end_ns + chosen.epoch_ns
    return Step(chosen.entry.metadata.step, start, end)


def _spans(stored: recording_pb2.Spans, chosen: Chosen) -> Spans:
    start = np.cumsum(np.array(stored.starts, np.int64)) + chosen.epoch_ns
    return Spans(
        start_ns=start,
        end_ns=start + np.array(stored.lengths, np.int64),
        name=np.array(stored.names, np.int32),
        depth=np.array(stored.depths, np.int32),
        phase=np.array(stored.phases, np.uint8),
    )
