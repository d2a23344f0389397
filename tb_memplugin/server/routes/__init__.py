"""One file per route: `answer(session, request)` gives what the route says."""

from __future__ import annotations

from collections.abc import Callable

from tb_memplugin.server.routes import compare, curve, lanes, modules, moment, runs, step
from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Session
from tb_memplugin.server.shapes import Json

ROUTES: dict[str, Callable[[Session, Request], Json]] = {
    "/runs": runs.answer,
    "/step": step.answer,
    "/curve": curve.answer,
    "/moment": moment.answer,
    "/lanes": lanes.answer,
    "/modules": modules.answer,
    "/compare": compare.answer,
}
