"""Custom rules from an address: searched for in a process of its own.

A pattern may take for ever on one frame, and Python can neither stop a search nor let other threads run
while it lasts: TensorBoard would stand still.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence

import numpy as np

from tb_memplugin.analysis.breakdown import Part
from tb_memplugin.analysis.rules import UNKNOWN, Rules, read_rules
from tb_memplugin.analysis.stacks import StackRow
from tb_memplugin.errors import MemPluginError
from tb_memplugin.trace.frames import distinct, lowest_in_stacks, read_frame

MOST_RULES = 64
SECONDS = 10.0

_SEARCH = """
import json, re, sys
asked = json.load(sys.stdin)
patterns = [re.compile(pattern, flags) for pattern, flags in asked["patterns"]]
def first(texts):
    return next((row for row, p in enumerate(patterns) if any(map(p.search, texts))), len(patterns))
json.dump([first(texts) for texts in asked["texts"]], sys.stdout)
"""


def rule_parts(text: str, rows: Sequence[StackRow]) -> tuple[Part, ...]:
    """What the stacks of each rule allocated, in the rules' order, and last what none matches.

    Args:
        text: lines of `name=regex`; empty ones do not count.
        rows: what each stack allocated.

    Raises:
        MemPluginError: a line is no rule, a pattern is invalid or takes too long.
    """
    rules = rules_in(text)
    rank = _ranks(rules, sorted(distinct(row.frames for row in rows)))
    found = lowest_in_stacks(rank, [row.frames for row in rows], len(rules.names))
    return tuple(
        Part(key, sum(row.bytes for row in mine), sum(row.calls for row in mine))
        for place, key in enumerate((*rules.names, UNKNOWN))
        for mine in [[rows[at] for at in np.flatnonzero(found == place).tolist()]]
    )


def rules_in(text: str) -> Rules:
    """The rules in lines of `name=regex`. Never a file's: an address must not make us open one.

    Raises:
        MemPluginError: a line is no rule, or a pattern is invalid.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) > MOST_RULES:
        raise MemPluginError(
            f"These are {len(lines)} rules.", where="rules", fix=f"Give at most {MOST_RULES}."
        )
    rules = []
    for line in lines:
        name, equals, pattern = line.partition("=")
        if not (name.strip() and equals and pattern.strip()):
            raise MemPluginError(
                f"{line[:80]!r} is no rule.", where="rules", fix="Write name=regex, one a line."
            )
        rules.append({"name": name.strip(), "pattern": pattern.strip()})
    return read_rules([json.dumps(rules)])


def _ranks(rules: Rules, texts: list[str]) -> dict[str, int]:
    """The first rule that each frame matches, their number where none does."""
    if not rules.names or not texts:
        return dict.fromkeys(texts, len(rules.names))
    frames = [read_frame(text) for text in texts]
    asked = {
        "patterns": [[pattern.pattern, int(pattern.flags)] for pattern in rules.patterns],
        "texts": [[frame.function, frame.file] for frame in frames],
    }
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _SEARCH],
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=SECONDS,
            check=True,
        )
    except subprocess.TimeoutExpired as error:
        raise MemPluginError(
            f"The rules were not done within {SECONDS:.0f} seconds.",
            where="rules",
            fix="Some pattern tries too many ways to match: leave out nested repeats such as (a+)+.",
        ) from error
    except (OSError, subprocess.CalledProcessError) as error:
        raise MemPluginError(
            "The rules could not be searched for.", where="rules", fix="Look at TensorBoard's log."
        ) from error
    return dict(zip(texts, json.loads(done.stdout), strict=True))
