"""The tab has a name for each rule of Advice and each format of Export, and for nothing else."""

from __future__ import annotations

import re
from pathlib import Path

from tb_memplugin.analysis.advice_rules import RULES
from tb_memplugin.exports.formats import FORMATS

STATE = Path(__file__).parents[1] / "frontend" / "src" / "state"


def test_rules():
    source = (STATE / "advice.ts").read_text("utf-8")
    table = source[source.index("export const RULES") : source.index("};")]
    assert re.findall(r"^  (\w+): \{", table, re.M) == list(RULES)


def test_formats():
    source = (STATE / "exports.ts").read_text("utf-8")
    assert set(re.findall(r'\{ id: "(\w+)"', source)) == set(FORMATS)
