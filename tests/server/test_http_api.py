"""docs/http_api.md: its example runs, and it names every route and parameter. Fields: test_contract.py."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import tb_memplugin
from tb_memplugin.server.routes import ROUTES
from tb_memplugin.server.selection import Request
from tb_memplugin.store.writer import RunWriter, StepsWriter
from tests.server.conftest import BASELINE
from tests.server.tab import Tab
from tests.server.test_allocator import made
from tests.step_figures import figures
from tests.tensorboard.process import tensorboard

DOCUMENT = (Path(__file__).parents[2] / "docs" / "http_api.md").read_text("utf-8")
(EXAMPLE,) = re.findall(r"```python\n(.*?)```", DOCUMENT, re.DOTALL)

ABOUT_ALL = DOCUMENT.partition("## All routes\n")[2].partition("\n## Runs and steps")[0]
SECTIONS = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", DOCUMENT, re.DOTALL | re.MULTILINE))
COMMON = "\n| common | |" + DOCUMENT.partition("| common | |")[2].partition("\n\n")[0]
OTHER_HEADINGS = {"Errors", "Parameters that many routes have", "Objects in the answers", "Groups of modules"}

STEP = {"run": "made", "worker": "rank0", "step": 0, "device": "cuda:0"}
BASE = {f"base_{name}": value for name, value in STEP.items()}
CALLS: dict[str, list[dict[str, Any]]] = {
    "runs": [{}],
    "steps": [STEP],
    "step_figures": [STEP],
    "ranks": [STEP],
    "fleet": [{}, {"run": "made", "pattern": "made", "filter": "rank0"}],
    "curve": [STEP, {**STEP, "by": "module", "fold": 1}, {**STEP, "step": "all", "window_step": 0}],
    "moment": [
        {**STEP, "t": 0},
        {**STEP, "event": 0, "by": "module", "fold": 1},
        {**STEP, "event": 1, "since": 0},
    ],
    "compare": [{**STEP, **BASE}, {**STEP, **BASE, "by": "module", "fold": 1}],
    "allocation_bands": [{**STEP, "most": 1}, {**STEP, "colour": "module", "fold": 1}],
    "allocation": [{**STEP, "row": 1}],
    "allocator": [{**STEP, "event": 0}],
    "allocator_segments": [{**STEP, "event": 0}],
    "allocator_block": [{**STEP, "event": 0, "row": 0}],
    "stacks": [{**STEP, "find": "model"}],
    "stack_table": [{**STEP, "of": "step"}],
    "rule_table": [{**STEP, "event": 1, "rules": "all=."}],
    "export_about": [{**STEP, "to": "csv"}],
}
"""What each route is asked; those that are not here, for STEP alone."""


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    folder = tmp_path_factory.mktemp("logdir")
    (folder / "made.pickle").write_bytes(pickle.dumps(made()))
    RunWriter(str(folder / "made"), "rank0").write(tb_memplugin.load(folder / "made.pickle"))
    StepsWriter(str(folder / "made"), "rank0", 0).write(figures([500], phases={"forward": [400]}))
    return Tab(folder)


def names(cell: str) -> set[str]:
    return set(re.findall(r"`(\w+)(?:=\w+)?`", cell))


def parameters_in(section: str) -> set[str]:
    """The names in the first column of the part "parameters" of the first table."""
    found: set[str] = set()
    inside = False
    for line in section[section.index("\n|") + 1 :].partition("\n\n")[0].splitlines():
        first, _, second = line.strip("| ").partition(" | ")
        if first.startswith("**"):
            inside = first == "**parameters**"
        if inside:
            found |= names(first)
            for group in re.findall(r"\b(?:STEP|STRETCH|MOMENT|FOLD)\b", second):
                found |= names(
                    next(line for line in ABOUT_ALL.splitlines() if line.startswith(f"| {group} |"))
                )
            found |= parameters_in(COMMON) if second.startswith("the common") else set()
    return found


def test_every_route_is_documented():
    headings = set(re.findall(r"^### (.*)$", DOCUMENT, re.MULTILINE))
    assert headings - OTHER_HEADINGS == {route.removeprefix("/") for route in ROUTES} | {"export"}


@pytest.mark.parametrize("route", ROUTES)
def test_a_route_answers_with_every_field_that_it_declares(tab, route):
    answers = [tab.get(route[1:], **parameters) for parameters in CALLS.get(route[1:], [STEP])]
    assert {name for answer in answers for name in answer} == set(
        get_type_hints(get_type_hints(ROUTES[route])["return"])
    )


@pytest.mark.parametrize("route", [route.removeprefix("/") for route in ROUTES])
def test_a_route_reads_no_parameter_that_is_not_documented(tab, route, monkeypatch):
    read: set[str] = set()

    class Noted(dict[str, str]):
        def get(self, name, default=None):
            read.add(name)
            return super().get(name, default)

    of = Request.of
    monkeypatch.setattr(
        Request,
        "of",
        lambda asked: Request(Noted((found := of(asked)).parameters), found.ctx, found.experiment),
    )
    for parameters in CALLS.get(route, [STEP]):
        tab.get(route, **parameters)
    assert read - parameters_in(SECTIONS[route]) <= {"span", "base_span"}, "read with every step"


def test_the_example(tmp_path, capsys):
    RunWriter(str(tmp_path / "baseline"), "rank0").write(BASELINE)
    with tensorboard(tmp_path) as server:
        server.wait_for("runs", lambda answer: len(answer["runs"]) == 1)
        exec(EXAMPLE.replace("http://localhost:6006", server.url), {})
    assert capsys.readouterr().out.splitlines() == [
        "step 6 of baseline: 467 bytes",
        "            400  parameter",
        "             60  gradient",
        "              7  optimizer_state",
    ]
