"""`advice`: what of the memory of a device could be saved, the evidence, and what was not judged."""

from __future__ import annotations

from tb_memplugin.analysis.advice import Evidence, Finding, Where, advice
from tb_memplugin.server.kept import Kept
from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Session
from tb_memplugin.server.shapes import Json

_KEPT = Kept(16)

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
    """From the side file."""
    opened = session.opened(session.chosen(request))
    trace, name = opened.trace, opened.trace.devices[opened.device].name
    found = _KEPT.of(trace, opened.device, lambda: advice(trace, name))
    return {
        "steps": [step.number for step in trace.steps],
        "findings": [_finding(finding) for finding in found.findings],
        "judgements": [
            {"kind": told.kind, "verdict": told.verdict, "why": told.why} for told in found.judgements
        ],
    }


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
