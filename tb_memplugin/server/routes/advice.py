"""`advice`: which memory of a device could be saved, the evidence, and what could not be judged."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import TypedDict

from tb_memplugin.analysis.advice_rules import Advice, advice, advice_on_steps
from tb_memplugin.analysis.findings import Finding, Judgement
from tb_memplugin.analysis.growth import WindowLevel, spread, window_levels
from tb_memplugin.analysis.peak_holders import Holder, PeakHolders
from tb_memplugin.errors import NotRecordedError, UnreadableFileError
from tb_memplugin.server.cache import RESULTS
from tb_memplugin.server.catalog import Entry
from tb_memplugin.server.routes.steps import requested_series, watched_row
from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Session
from tb_memplugin.trace.step_figures import StepFigures


class AdviceAnswer(TypedDict):
    """What of a device's memory could be saved."""

    steps: list[int]
    """Numbers of the window's steps; empty if only a monitor watched the step."""
    watched_steps: int
    """How many steps of `MemoryMonitor` were judged in place of a window; else 0."""
    findings: list[Finding]
    """Problems first, then the largest first."""
    judgements: list[Judgement]
    """One per rule."""
    peak: PeakHolders | None
    """Who fills the peak; null if nothing was ever alive."""


def answer(session: Session, request: Request) -> AdviceAnswer:
    """Answer from the side file; for a step of which there are figures alone, from all figures."""
    try:
        chosen = session.chosen(request)
    except NotRecordedError:
        watched_workers = session.monitored.runs(request.ctx, request.experiment).workers
        if (request.text("run"), request.text("worker")) not in watched_workers:
            raise
        return _of_figures(session, request)
    opened = session.opened(chosen)
    trace, name = opened.trace, opened.trace.devices[opened.device].name
    windows = _windows(session, request, chosen.entry)
    watched = _watched(session, request, chosen.entry)
    count = 0 if watched is None else len(watched)
    key = ("advice", opened.device, count, *(entry.metadata.side_file for entry in windows))
    judged = RESULTS.of_window(
        trace, key, lambda: advice(trace, name, lambda: _levels(session, windows), watched)
    )
    return _answer(judged, name, [step.number for step in trace.steps])


def _of_figures(session: Session, request: Request) -> AdviceAnswer:
    series, device = requested_series(session, request)
    watched_row(series.figures, request.number("step"))
    judged = advice_on_steps(series.figures)
    return _answer(judged, series.figures.devices[device].name, [], series.figures.step_count)


def _answer(judged: Advice, device: str, steps: list[int], watched_steps: int = 0) -> AdviceAnswer:
    return {
        "steps": steps,
        "watched_steps": watched_steps,
        "findings": [finding for finding in judged.findings if finding.device == device],
        "judgements": [judgement for judgement in judged.judgements if judgement.device == device],
        "peak": _shown(judged.peaks[0]) if judged.peaks else None,
    }


def _windows(session: Session, request: Request, entry: Entry) -> list[Entry]:
    """Return one step of each window of the worker; of too many windows a choice spread over the run."""
    steps = session.catalog.worker(request.ctx, request.experiment, entry)
    first_step = {step.metadata.side_file: step for step in reversed(steps)}
    return spread(list(first_step.values())[::-1])


def _watched(session: Session, request: Request, entry: Entry) -> StepFigures | None:
    """Return all steps that a monitor of the same worker watched, if one did."""
    runs = session.monitored.runs(request.ctx, request.experiment)
    series = runs.workers.get((entry.run, entry.worker))
    return None if series is None else series.figures


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


MOST_HOLDERS = 8
"""So many holders are sent; the others are one holder, named `REST`."""

REST = "(others)"


def _shown(peak: PeakHolders) -> PeakHolders:
    rest = peak.holders[MOST_HOLDERS:]
    if not rest:
        return peak
    size, blocks = sum(holder.bytes for holder in rest), sum(holder.blocks for holder in rest)
    others = Holder(REST, size, blocks, category="", is_name=False)
    return replace(peak, holders=(*peak.holders[:MOST_HOLDERS], others))
