"""The routes: each `answer(session, request)` returns its answer; a file has those about one thing.

`make contract` writes the types for the tab and the tables of docs/http_api.md from them.
"""

from __future__ import annotations

from collections.abc import Callable

from tb_memplugin.server.routes import (
    advice,
    allocations,
    allocator,
    compare,
    curve,
    export,
    fleet,
    lanes,
    modules,
    moment,
    oom,
    ranks,
    runs,
    stacks,
    step,
    steps,
)
from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Session

ROUTES: dict[str, Callable[[Session, Request], object]] = {
    "/runs": runs.answer,
    "/step": step.answer,
    "/steps": steps.answer,
    "/ranks": ranks.answer,
    "/fleet": fleet.answer,
    "/step_figures": steps.answer_figures,
    "/curve": curve.answer,
    "/moment": moment.answer,
    "/stretch": moment.answer_stretch,
    "/lanes": lanes.answer,
    "/modules": modules.answer,
    "/compare": compare.answer,
    "/allocator": allocator.answer,
    "/allocator_curve": allocator.answer_curve,
    "/allocator_segments": allocator.answer_segments,
    "/allocator_block": allocator.answer_block,
    "/allocator_oom": oom.answer,
    "/divisions": curve.answer_divisions,
    "/export_about": export.about,
    "/advice": advice.answer,
    "/stacks": stacks.answer,
    "/stack_table": stacks.answer_table,
    "/line_table": stacks.answer_lines,
    "/rule_table": stacks.answer_rules,
    "/allocation_bands": allocations.answer_bands,
    "/allocations": allocations.answer,
    "/allocation": allocations.answer_one,
}
