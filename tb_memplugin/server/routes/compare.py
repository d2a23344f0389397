"""`compare`: what changed from one step to another, across any runs, workers and devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from tb_memplugin.analysis.comparison import Status, compare_parts, shortened_deltas
from tb_memplugin.analysis.curves import OTHERS
from tb_memplugin.analysis.divisions import ALL_DIVISIONS, DIVISIONS, By, Part, breakdown
from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.proto.recording_pb2 import DeviceSummary, StepSummary
from tb_memplugin.server.frames import labels_of
from tb_memplugin.server.grouping import folded, wants_groups
from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Chosen, Opened, Session
from tb_memplugin.server.shapes import shape_of
from tb_memplugin.store.reader import peak_parts

MOST_ROWS, MOST_MODULES = 2_000, 20_000
"""The most rows in an answer, and the most if divided by module. The page folds modules itself, so it needs
each of them: a layer in `(others)` would be missing in its row."""


class CompareSide(TypedDict):
    """One of the two steps."""

    run: str
    worker: str
    step: int
    device: str
    """As picked."""
    peak_bytes: int
    """Its peak."""
    allocations: int
    """How many there were in the step."""


class CompareRow(TypedDict):
    """A part of memory on both sides."""

    key: str
    label: str
    """Its name, and what to show for it."""
    status: Status
    """What became of it."""
    base_bytes: int
    other_bytes: int
    delta_bytes: int
    """Other minus base."""
    base_count: int
    other_count: int
    """Numbers of allocations."""
    category: str | None
    """By module, the category that changed most; else null."""
    category_delta_bytes: int
    """By how much it changed."""


class CompareAnswer(TypedDict):
    """What changed from the peak of one step to that of another."""

    base: CompareSide
    other: CompareSide
    """The two steps."""
    delta_bytes: int
    """The other peak minus the base's. The rows' deltas sum to it."""
    rows: list[CompareRow]
    """Largest change first. From the 2,001st on (by module from the 20,001st), they are one row `(others)`.
    With `fold=1`, the groups are those of the picked window."""


def answer(session: Session, request: Request) -> CompareAnswer:
    """Compare the peaks of both steps, from the summaries or, for other divisions, from the side files."""
    by = request.choice("by", ALL_DIVISIONS, "category")
    chosen, base_chosen = session.chosen(request), session.chosen(request, "base_")
    other_summary, other = session.device_summary(request, chosen)
    base_summary, base = session.device_summary(request, base_chosen)
    if wants_groups(request, by):
        opened = session.opened(chosen)
        sides = _base_modules(session, base_chosen, base_summary, base), _parts(opened, other, by)
        rows = compare_parts(*(folded(request, opened, parts) for parts in sides))
    elif by in DIVISIONS:
        rows = compare_parts(peak_parts(base_summary, base, by), peak_parts(other_summary, other, by))
    else:
        sides = _parts(session.opened(base_chosen), base, by), _parts(session.opened(chosen), other, by)
        rows = compare_parts(*sides)
    rows = shortened_deltas(rows, MOST_MODULES if by == "module" else MOST_ROWS, OTHERS)
    labels = labels_of([row.key for row in rows], by)
    return {
        "base": _side(base_chosen, base),
        "other": _side(chosen, other),
        "delta_bytes": other.peak.bytes - base.peak.bytes,
        "rows": [shape_of(CompareRow, row, label=label) for row, label in zip(rows, labels, strict=True)],
    }


def _base_modules(
    session: Session, chosen: Chosen, summary: StepSummary, device: DeviceSummary
) -> Sequence[Part]:
    """Return the parts by module from the side file; if it cannot be read, those in the summary."""
    try:
        return _parts(session.opened(chosen), device, "module")
    except UnreadableFileError:
        return peak_parts(summary, device, "module")


def _parts(opened: Opened, device: DeviceSummary, by: By) -> Sequence[Part]:
    return breakdown(opened.trace, opened.device, device.stats.peak_event, by)


def _side(chosen: Chosen, device: DeviceSummary) -> CompareSide:
    return {
        "run": chosen.entry.run,
        "worker": chosen.entry.worker,
        "step": chosen.entry.metadata.step,
        "device": chosen.device,
        "peak_bytes": device.peak.bytes,
        "allocations": device.stats.allocations,
    }
