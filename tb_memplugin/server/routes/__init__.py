"""One file per route; its `answer(session, request)` returns a TypedDict.

`make contract` writes the types for the tab and the tables of docs/http_api.md from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tb_memplugin.server.routes import (
    advice,
    allocation_bands,
    allocations,
    allocator,
    allocator_block,
    allocator_curve,
    allocator_oom,
    allocator_segments,
    compare,
    curve,
    divisions,
    export,
    fleet,
    lanes,
    modules,
    moment,
    ranks,
    runs,
    stack_tables,
    stacks,
    step,
    step_figures,
    steps,
    stretch,
)
from tb_memplugin.server.selection import Request
from tb_memplugin.server.session import Session

ROUTES: dict[str, Callable[[Session, Request], Mapping[str, object]]] = {
    "/runs": runs.answer,
    "/step": step.answer,
    "/steps": steps.answer,
    "/ranks": ranks.answer,
    "/fleet": fleet.answer,
    "/step_figures": step_figures.answer,
    "/curve": curve.answer,
    "/moment": moment.answer,
    "/stretch": stretch.answer,
    "/lanes": lanes.answer,
    "/modules": modules.answer,
    "/compare": compare.answer,
    "/allocator": allocator.answer,
    "/allocator_curve": allocator_curve.answer,
    "/allocator_segments": allocator_segments.answer,
    "/allocator_block": allocator_block.answer,
    "/allocator_oom": allocator_oom.answer,
    "/divisions": divisions.answer,
    "/export_about": export.about,
    "/advice": advice.answer,
    "/stacks": stacks.answer,
    "/stack_table": stack_tables.answer,
    "/line_table": stack_tables.answer_lines,
    "/rule_table": stack_tables.answer_rules,
    "/allocation_bands": allocation_bands.answer,
    "/allocations": allocations.answer,
    "/allocation": allocations.answer_one,
}
