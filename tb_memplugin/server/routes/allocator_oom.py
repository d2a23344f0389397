"""`allocator_oom`: the requests that failed on a device, and why."""

from __future__ import annotations

from collections.abc import Sequence

from tb_memplugin.analysis.divisions import Part
from tb_memplugin.analysis.oom import OomReport, oom_reports
from tb_memplugin.server.frames import labels_of
from tb_memplugin.server.routes.allocator_curve import ooms_shape
from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Opened, Session
from tb_memplugin.server.shapes import Json, parts_shape

LARGEST_LINES = 8
MOST_REPORTS = 20
"""A job that retries in a loop fails thousands of times."""

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
    ooms = ooms_shape(opened)
    reported = {oom["number"]: oom for oom in _reported(ooms, opened)}
    reports = oom_reports(opened.trace, opened.device, list(reported))
    return {"ooms": ooms, "reports": [{**reported[report.number], **_shape(report)} for report in reports]}


def _reported(ooms: Sequence[Json], opened: Opened) -> list[Json]:
    """Return the last requests, and before them the first of the step or window, where a reader begins."""
    step = opened.trace.steps[opened.step].number
    earlier = [oom for oom in ooms[:-MOST_REPORTS] if opened.is_window or oom["step"] == step]
    return [*earlier[:1], *ooms[-MOST_REPORTS:]]


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
