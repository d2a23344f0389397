"""`lanes`: what ran under a stretch of the curve."""

from __future__ import annotations

import numpy as np

from tb_memplugin.analysis.lanes import lanes
from tb_memplugin.errors import MemPluginError, UnreadableFileError
from tb_memplugin.proto import summary_pb2
from tb_memplugin.server.selection import MOST_COLUMNS, Request
from tb_memplugin.server.session import Chosen, Session
from tb_memplugin.server.shapes import Json
from tb_memplugin.trace import Module, Phase, Spans, Step

DEFAULT_COLUMNS = 1_000


def answer(session: Session, request: Request) -> Json:
    """From the side file; without it, the longest calls, which the summary keeps."""
    chosen = session.chosen(request)
    columns = request.number("px", DEFAULT_COLUMNS, 1, MOST_COLUMNS)
    try:
        trace = session.opened(chosen).trace
        steps, phases, calls, modules = trace.steps, trace.phases, trace.calls, trace.modules
        start, end = session.opened(chosen).span()
    except UnreadableFileError:
        summary, device = session.device_summary(request, chosen)
        phases, calls = _spans(summary.phases, chosen), _spans(summary.calls, chosen)
        modules = tuple(Module(key) for key in summary.modules.keys)
        steps = (_step(chosen),)
        start, end = device.curve.t0_ns + chosen.epoch_ns, device.curve.t1_ns + chosen.epoch_ns
    epoch = chosen.epoch_ns
    t0, t1 = request.number("t0", start - epoch), request.number("t1", end - epoch)
    if t0 >= t1:
        raise MemPluginError(
            f"The span from {t0} to {t1} is empty.", where="t0, t1", fix="Give t0 before t1."
        )
    found = lanes(steps, phases, calls, modules, t0 + epoch, t1 + epoch, columns)
    return {
        "t0": t0,
        "t1": t1,
        "steps": [
            {
                "start_ns": s.start_ns - epoch,
                "end_ns": s.end_ns - epoch,
                "name": f"Step {s.number}",
                "phase": None,
            }
            for s in found.steps
        ],
        "phases": _shape(found.phases, [Phase(phase).key for phase in found.phases.name.tolist()], epoch),
        "modules": [
            _shape(level, [modules[row].key for row in level.name.tolist()], epoch) for level in found.modules
        ],
        "omitted": found.omitted,
    }


def _shape(spans: Spans, names: list[str], epoch_ns: int) -> list[Json]:
    start, end = (spans.start_ns - epoch_ns).tolist(), (spans.end_ns - epoch_ns).tolist()
    rows = zip(start, end, names, spans.phase.tolist(), strict=True)
    return [
        {"start_ns": start, "end_ns": end, "name": name, "phase": Phase(phase).key}
        for start, end, name, phase in rows
    ]


def _step(chosen: Chosen) -> Step:
    stats = next(item.stats for item in chosen.entry.metadata.devices if item.device == chosen.device)
    start, end = stats.step_start_ns + chosen.epoch_ns, stats.step_end_ns + chosen.epoch_ns
    return Step(chosen.entry.metadata.step, start, end)


def _spans(stored: summary_pb2.Spans, chosen: Chosen) -> Spans:
    start = np.cumsum(np.array(stored.starts, np.int64)) + chosen.epoch_ns
    return Spans(
        start_ns=start,
        end_ns=start + np.array(stored.lengths, np.int64),
        name=np.array(stored.names, np.int32),
        depth=np.array(stored.depths, np.int32),
        phase=np.array(stored.phases, np.uint8),
    )
