"""`advice`: which memory of a device could be saved, the evidence, and what could not be judged."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from tb_memplugin.analysis.advice_rules import Evidence, Finding, Where, advice
from tb_memplugin.analysis.growth import WindowLevel, spread, window_levels
from tb_memplugin.errors import UnreadableFileError
from tb_memplugin.server.cache import RESULTS
from tb_memplugin.server.catalog import Entry
from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Session
from tb_memplugin.server.shapes import Json

_OF_A_FINDING = (
    "kind",
    "level",
    "step",
    "title",
    "subject",
    "bytes",
    "measure",
    "of_bytes",
    "what_to_do",
    "price",
    "levels",
)


def answer(session: Session, request: Request) -> Json:
    """Answer from the side file."""
    chosen = session.chosen(request)
    opened = session.opened(chosen)
    trace, name = opened.trace, opened.trace.devices[opened.device].name
    windows = _windows(session, request, chosen.entry)
    key = ("advice", opened.device, *(entry.metadata.side_file for entry in windows))
    judged = RESULTS.of_window(trace, key, lambda: advice(trace, name, lambda: _levels(session, windows)))
    return {
        "steps": [step.number for step in trace.steps],
        "findings": [_finding(finding) for finding in judged.findings],
        "judgements": [
            {"kind": judgement.kind, "verdict": judgement.verdict, "why": judgement.why}
            for judgement in judged.judgements
        ],
    }


def _windows(session: Session, request: Request, entry: Entry) -> list[Entry]:
    """Return one step of each window of the worker; of too many windows a choice spread over the run."""
    steps = session.catalog.worker(request.ctx, request.experiment, entry)
    first_step = {step.metadata.side_file: step for step in reversed(steps)}
    return spread(list(first_step.values())[::-1])


def _levels(session: Session, windows: Sequence[Entry]) -> list[WindowLevel]:
    """Return the levels of windows, without those that cannot be read."""
    levels: list[WindowLevel] = []
    for entry in windows:
        try:
            trace = session.windows.load(entry)
        except UnreadableFileError:
            continue  # the route `runs` lists it as unreadable
        levels += RESULTS.of_window(trace, "levels", functools.partial(window_levels, trace))
    return levels


def _finding(finding: Finding) -> Json:
    shape = {name: getattr(finding, name) for name in _OF_A_FINDING}
    return {
        **shape,
        "evidence": [_evidence(row) for row in finding.evidence],
        "where": _where(finding.where),
    }


def _evidence(row: Evidence) -> Json:
    return {
        "what": row.what,
        "bytes": row.bytes,
        "detail": row.detail,
        "name": row.name,
        "where": None if row.where is None else _where(row.where),
    }


def _where(where: Where) -> Json:
    return {"view": where.view, "state": dict(where.state)}
