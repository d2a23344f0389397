"""The route of requests for memory that failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from tb_memplugin.analysis import oom
from tb_memplugin.analysis.divisions import Part as StackPart
from tb_memplugin.server.frames import labels_of
from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Opened, Session
from tb_memplugin.server.shapes import Part, parts_shape, shape_of

LARGEST_LINES = 8
MOST_REPORTS = 20
"""A job that retries in a loop fails thousands of times."""


class FailedRequest(TypedDict):
    """A request that failed."""

    number: int
    """Its number within the window."""
    event: int
    time_ns: int
    step: int
    """When it was."""
    requested_bytes: int
    """Its size."""


def ooms_shape(opened: Opened) -> list[FailedRequest]:
    """Return the device's failed requests in the whole window."""
    trace = opened.trace
    rows = [(row, trace.ooms[row]) for row in oom.failed_requests(trace, opened.device)]
    return [
        {
            "number": row,
            "event": failed.event,
            "time_ns": opened.time_ns(failed.event),
            "step": trace.step_at(failed.event).number,
            "requested_bytes": failed.requested_bytes,
        }
        for row, failed in rows
    ]


class LineAtOom(TypedDict):
    """A source line, and what it had allocated when a request failed."""

    line: str
    """The line."""
    stack: str
    """The largest of its stacks."""
    stacks: int
    """How many it has."""
    bytes: int
    count: int
    """Its allocations."""


class OtherLines(TypedDict):
    """All other source lines together."""

    lines: int
    """How many."""
    bytes: int
    count: int
    """Their allocations. Together with `lines`, `active_bytes`."""


class OomReport(FailedRequest):
    """A request that failed, and the device at that moment."""

    new_segment_bytes: int
    """The segment that the allocator would have had to take from the device."""
    free_bytes: int | None
    """Free on the device."""
    reserved_bytes: int | None
    active_bytes: int
    pending_bytes: int
    """The allocator's."""
    pool: str
    stream: str
    """Of the request."""
    reserve_free_bytes: int | None
    largest_free_bytes: int | None
    """Free in all segments, and the largest free block."""
    usable_free_bytes: int | None
    largest_usable_bytes: int | None
    """The same, of what this request could use."""
    cause: oom.Cause
    """Why it failed."""
    why: str
    """The cause in sentences."""
    by_category: list[Part]
    """What was alive."""
    lines: list[LineAtOom]
    """The 8 largest source lines."""
    other_lines: OtherLines
    """All others."""


class FailedRequests(TypedDict):
    """The requests that failed on a device, in the whole window."""

    ooms: list[FailedRequest]
    """All of them."""
    reports: list[OomReport]
    """Of the last 20, and of the first one in the step."""


def answer(session: Session, request: Request) -> FailedRequests:
    """Answer from the side file."""
    opened = session.opened(session.chosen(request))
    ooms = ooms_shape(opened)
    reported = {failed["number"]: failed for failed in _reported(ooms, opened)}
    reports = oom.oom_reports(opened.trace, opened.device, list(reported))
    return {"ooms": ooms, "reports": [_report_shape(report, reported[report.number]) for report in reports]}


def _reported(ooms: Sequence[FailedRequest], opened: Opened) -> list[FailedRequest]:
    """Return the last requests, and before them the first of the step or window, where a reader begins."""
    step = opened.trace.steps[opened.step].number
    earlier = [failed for failed in ooms[:-MOST_REPORTS] if opened.is_window or failed["step"] == step]
    return [*earlier[:1], *ooms[-MOST_REPORTS:]]


def _report_shape(report: oom.OomReport, failed: FailedRequest) -> OomReport:
    lines = _lines_shape(report.stacks)
    rest = lines[LARGEST_LINES:]
    other_lines = OtherLines(
        lines=len(rest), bytes=sum(line["bytes"] for line in rest), count=sum(line["count"] for line in rest)
    )
    return shape_of(
        OomReport,
        report,
        **failed,
        by_category=parts_shape(report.parts),
        lines=lines[:LARGEST_LINES],
        other_lines=other_lines,
    )


def _lines_shape(stacks: Sequence[StackPart]) -> list[LineAtOom]:
    """Group stacks by their leading line; each line has the largest of its stacks."""
    lines: dict[str, LineAtOom] = {}
    for stack, label in zip(stacks, labels_of([stack.key for stack in stacks], "stack"), strict=True):
        line = lines.setdefault(
            label, {"line": label, "stack": stack.key, "stacks": 0, "bytes": 0, "count": 0}
        )
        line["stacks"] += 1
        line["bytes"] += stack.bytes
        line["count"] += stack.count
    return sorted(lines.values(), key=lambda line: -line["bytes"])
