"""`compare`: what changed from one step to another, of any runs, workers and devices."""

from __future__ import annotations

from tb_memplugin.analysis.breakdown import DIVISIONS
from tb_memplugin.analysis.compare import Delta, compare_parts
from tb_memplugin.errors import MemPluginError
from tb_memplugin.proto.summary_pb2 import DeviceSummary
from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Chosen, Session
from tb_memplugin.server.shapes import Json
from tb_memplugin.store.reader import peak_parts


def answer(session: Session, request: Request) -> Json:
    """From the two summaries, at the peaks of their steps."""
    by = request.text("by", "category")
    if by not in DIVISIONS:
        fix = f"Choose one of: {', '.join(DIVISIONS)}."
        raise MemPluginError(f"Cannot divide memory by {by!r}.", where="by", fix=fix)
    chosen, base_chosen = session.chosen(request), session.chosen(request, "base_")
    other_summary, other = session.device_summary(request, chosen)
    base_summary, base = session.device_summary(request, base_chosen)
    rows = compare_parts(peak_parts(base_summary, base, by), peak_parts(other_summary, other, by))
    return {
        "base": _side(base_chosen, base),
        "other": _side(chosen, other),
        "delta_bytes": other.peak.bytes - base.peak.bytes,
        "rows": [_row(row) for row in rows],
    }


def _side(chosen: Chosen, device: DeviceSummary) -> Json:
    return {
        "run": chosen.entry.run,
        "worker": chosen.entry.worker,
        "step": chosen.entry.metadata.step,
        "device": chosen.device,
        "peak_bytes": device.peak.bytes,
        "allocations": device.stats.allocations,
    }


def _row(row: Delta) -> Json:
    return {
        "key": row.key,
        "status": row.status,
        "base_bytes": row.base_bytes,
        "other_bytes": row.other_bytes,
        "delta_bytes": row.delta_bytes,
        "base_count": row.base_count,
        "other_count": row.other_count,
        "category": row.category,
    }
