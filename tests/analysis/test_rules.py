"""Custom rules: forms, order, errors, and what they match."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tb_memplugin.analysis.divisions import breakdown
from tb_memplugin.analysis.rules import read_rules
from tb_memplugin.errors import MemPluginError
from tests.recorded_program import program

STACKS = {
    "forward": ("mm ??:0", "forward /work/model.py:7", "main train.py:1"),
    "adam": ("step /site-packages/torch/optim/adamw.py:9", "main train.py:2"),
    "both": ("step /site-packages/torch/optim/adamw.py:9", "forward /work/model.py:8"),
}
PROGRAM = program(
    "before 1 w",
    "alloc 2 a at=forward",
    "alloc 4 b at=adam",
    "alloc 8 c at=both",
    "alloc 16 d",
    stacks=STACKS,
)


def parts(*texts: str) -> dict[str, int]:
    return {part.key: part.bytes for part in breakdown(PROGRAM, 0, 3, read_rules(texts))}


def test_the_first_rule_that_any_frame_matches_wins():
    assert parts("Forward=.*forward.*", "Optimizer=.*(optim|adam).*") == {
        "unknown": 17,
        "Forward": 10,
        "Optimizer": 4,
    }
    assert parts("Optimizer=.*(optim|adam).*", "Forward=.*forward.*") == {
        "unknown": 17,
        "Optimizer": 12,
        "Forward": 2,
    }


def test_a_rule_looks_at_functions_and_at_files_but_not_at_lines():
    assert parts("f=^forward$") == {"unknown": 21, "f": 10}
    assert parts("f=^/work/model.py$") == {"unknown": 21, "f": 10}
    assert parts("f=model.py:7") == {"unknown": 31}


def test_case_matters():
    assert parts("f=FORWARD") == {"unknown": 31}
    assert parts("f=(?i)FORWARD") == {"unknown": 21, "f": 10}


@pytest.mark.parametrize("pattern", [".*forward", ".*?forward", ".*", "forward|.*nothing", "(.*)forward"])
def test_a_pattern_that_begins_with_anything_finds_the_same(pattern):
    expected = 31 - 17 if pattern == ".*" else 10
    assert parts(f"f={pattern}")["f"] == expected


@pytest.mark.parametrize(
    "document",
    [
        {"Forward": "forward", "Optimizer": "adam"},
        {
            "rules": [
                {"name": "Forward", "pattern": "forward", "priority": 1},
                {"name": "Optimizer", "pattern": "adam"},
            ]
        },
        [
            {"name": "Forward", "pattern": "forward"},
            {"name": "Optimizer", "pattern": "adam", "description": "x"},
        ],
    ],
)
def test_a_json_file_has_any_of_the_known_forms(document, tmp_path: Path):
    file = tmp_path / "rules.json"
    file.write_text(json.dumps(document))
    assert read_rules([str(file)]).names == ("Forward", "Optimizer")
    assert read_rules([json.dumps(document)]).names == ("Forward", "Optimizer")
    assert parts(str(file)) == {"unknown": 17, "Forward": 10, "Optimizer": 4}


def test_a_file_may_have_an_equals_sign_in_its_name(tmp_path: Path):
    file = tmp_path / "a=b.json"
    file.write_text('{"x": "y"}')
    assert read_rules([str(file), "z=1=2"]).names == ("x", "z")


def test_a_pattern_may_hold_equals_signs():
    (pattern,) = read_rules(["z=1=2"]).patterns
    assert pattern.pattern == "1=2"


@pytest.mark.parametrize(
    ("texts", "told"),
    [
        (["Forward=("], "'Forward' is not a valid regular expression"),
        (["a=1", "a=2"], "'a' is used twice"),
        (["unknown=1"], "'unknown' is reserved for what no rule matches"),
        (["absent.json"], "does not exist or cannot be read"),
        (["[1, 2]"], "contains no rules"),
        (['{"a": 3}'], "needs a name and a pattern"),
        (["{"], "not valid JSON"),
        (["=x"], "needs a name and a pattern"),
        (["[" * 100_000], "not valid JSON"),
        (["a=" + "(" * 5_000 + ")" * 5_000], "'a' is not a valid regular expression"),
    ],
)
def test_what_is_no_rule_is_told_with_its_name(texts, told):
    with pytest.raises(MemPluginError, match=told.replace("(", r"\(")) as raised:
        read_rules(texts)
    assert raised.value.fix


def test_no_more_is_read_of_a_file_of_rules_than_it_may_have(tmp_path: Path):
    (tmp_path / "rules.json").symlink_to("/dev/zero")
    with pytest.raises(MemPluginError, match="too large"):
        read_rules([str(tmp_path / "rules.json")])
