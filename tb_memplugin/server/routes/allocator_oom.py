"""`allocator_oom`: the requests that failed on a device, and why."""

from __future__ import annotations

from collections.abc import Sequence

from tb_memplugin.analysis.breakdown import Part
from tb_memplugin.analysis.oom import OomReport, oom_reports
from tb_memplugin.server.frames import labels_of
from tb_memplugin.server.routes.allocator_curve import ooms_shape
from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Session
from tb_memplugin.server.shapes import Json, parts_shape

LARGEST_LINES = 8

_OF_A_REPORT = (
    "new_segment_bytes",
    "free_bytes",
    "reserved_bytes",
    "active_bytes",
    "pending_bytes",
    "pool",
    "stream",
    "reserve_free_bytes",
    "usable_free_bytes",
    "largest_usable_bytes",
    "largest_free_bytes",
    "cause",
    "why",
)


def answer(session: Session, request: Request) -> Json:
    """Answer from the side file."""
    opened = session.opened(session.chosen(request))
    failed = zip(ooms_shape(opened), oom_reports(opened.trace, opened.device), strict=True)
    return {"reports": [{**oom, **_shape(report)} for oom, report in failed]}


def _shape(report: OomReport) -> Json:
    lines = _lines_shape(report.stacks)
    return {
        **{name: getattr(report, name) for name in _OF_A_REPORT},
        "by_category": parts_shape(report.parts),
        "lines": lines[:LARGEST_LINES],
        "other_lines": {
            "lines": len(lines[LARGEST_LINES:]),
            "bytes": sum(line["bytes"] for line in lines[LARGEST_LINES:]),
            "count": sum(line["count"] for line in lines[LARGEST_LINES:]),
        },
    }


def _lines_shape(stacks: Sequence[Part]) -> list[Json]:
    """Group stacks by their leading line; each line has the largest of its stacks."""
    lines: dict[str, Json] = {}
    for stack, label in zip(stacks, labels_of([stack.key for stack in stacks], "stack"), strict=True):
        line = lines.setdefault(
            label, {"line": label, "stack": stack.key, "stacks": 0, "bytes": 0, "count": 0}
        )
        line["stacks"] += 1
        line["bytes"] += stack.bytes
        line["count"] += stack.count
    return sorted(lines.values(), key=lambda line: -int(line["bytes"]))
