"""Patterns from a request, such as those of custom rules, which are searched in a separate process.

A pattern may take endlessly on a single frame, and Python can neither stop a search nor run other threads
during it, so that all of TensorBoard would hang. To compile one may take minutes, too.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import BoundedSemaphore

import numpy as np

from tb_memplugin.analysis.divisions import Part
from tb_memplugin.analysis.rules import PATTERN_FIX, UNKNOWN, check_name
from tb_memplugin.analysis.stacks import StackRow
from tb_memplugin.analysis.sums import sums
from tb_memplugin.errors import MemPluginError
from tb_memplugin.server.turns import without_turn
from tb_memplugin.trace.frames import distinct, lowest_in_stacks, read_frame

MOST_RULES = 64
SECONDS = 10.0
"""The longest that a search may take, and that a request waits for its turn."""

MOST_SEARCHES = 2
"""How many searches run at the same time: each takes a core for as long as it takes."""

_turns = BoundedSemaphore(MOST_SEARCHES)

# The system ends a search whose server has been ended, and prefers the server to it.
_SEARCH = f"""
import json, os, re, signal, sys
if hasattr(signal, "alarm"):  # not on Windows
    signal.alarm({2 * SECONDS:.0f})
    os.nice(19)
asked = json.load(sys.stdin)
patterns = []
try:
    for text in asked["patterns"]:
        patterns.append(re.compile(text, asked["flags"]))
except (re.error, ValueError, OverflowError, RecursionError) as error:
    sys.exit(json.dump({{"invalid": len(patterns), "why": str(error)}}, sys.stdout))
def first(texts):
    return next((row for row, p in enumerate(patterns) if any(map(p.search, texts))), len(patterns))
json.dump({{"first": [first(texts) for texts in asked["texts"]]}}, sys.stdout)
"""


def rule_parts(text: str, rows: Sequence[StackRow]) -> tuple[Part, ...]:
    """Return what the stacks of each rule allocated, in the rules' order, and last what no rule matches.

    Args:
        text: lines of `name=regex`; empty lines are ignored.
        rows: what each stack allocated.

    Raises:
        MemPluginError: a line is no rule, a pattern is invalid or takes too long, or other searches do.
    """
    rules = rules_in(text)
    rank = _ranks(rules, sorted(distinct(row.frames for row in rows)))
    rule_of = lowest_in_stacks(rank, [row.frames for row in rows], len(rules))
    keys = (*rules, UNKNOWN)
    size = sums(rule_of, np.array([row.bytes for row in rows], np.int64), len(keys))
    calls = sums(rule_of, np.array([row.calls for row in rows], np.int64), len(keys))
    return tuple(map(Part, keys, size.tolist(), calls.tolist()))


def rules_in(text: str) -> dict[str, str]:
    """Return name and pattern of the rules in lines of `name=regex`, in order.

    Files are not accepted: a request must not make us open one.

    Raises:
        MemPluginError: a line is no rule, or a name cannot be used.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if len(lines) > MOST_RULES:
        raise MemPluginError(
            f"There are {len(lines)} rules.", where="rules", fix=f"Give at most {MOST_RULES}."
        )
    rules: dict[str, str] = {}
    for line in lines:
        name, _, pattern = (part.strip() for part in line.partition("="))
        if not (name and pattern):
            raise MemPluginError(
                f"{line[:80]!r} is not a rule.", where="rules", fix="Write name=regex, one rule per line."
            )
        check_name(name, rules, "rules")
        rules[name] = pattern
    return rules


def _ranks(rules: dict[str, str], texts: list[str]) -> dict[str, int]:
    """Return the index of the first rule that each frame matches; the number of rules if none does."""
    if not rules or not texts:
        return dict.fromkeys(texts, len(rules))
    frames = [read_frame(text) for text in texts]
    named = [f"Rule {name[:80]!r}" for name in rules]
    functions = [[frame.function, frame.file] for frame in frames]
    first = first_matches([*rules.values()], functions, "rules", named)
    return dict(zip(texts, first, strict=True))


def first_matches(
    patterns: Sequence[str], texts: Sequence[Sequence[str]], where: str, named: Sequence[str], flags: int = 0
) -> list[int]:
    """Return for each group of texts the first pattern that is found in one of them; else their number.

    Args:
        texts: groups of texts.
        where: the parameter that has the patterns, which errors name.
        named: what errors call each pattern.
        flags: of `re.compile`.

    Raises:
        MemPluginError: a pattern is invalid, the search takes too long, or other searches do.
    """
    search = {"patterns": patterns, "flags": flags, "texts": texts}
    try:
        with without_turn(), _turn(where):
            done = subprocess.run(
                [sys.executable, "-I", "-S", "-c", _SEARCH],
                input=json.dumps(search),
                capture_output=True,
                text=True,
                encoding="utf-8",
                timeout=SECONDS,
                check=True,
            )
    except subprocess.TimeoutExpired as error:
        raise MemPluginError(
            f"The search for the {where} took more than {SECONDS:.0f} seconds.",
            where=where,
            fix="A pattern is too long, or has too many ways to match: avoid nested repeats such as (a+)+.",
        ) from error
    except (OSError, subprocess.CalledProcessError) as error:
        raise MemPluginError(
            f"The search for the {where} failed.", where=where, fix="Look at TensorBoard's log."
        ) from error
    answer = json.loads(done.stdout)
    if "why" in answer:
        raise MemPluginError(
            f"{named[answer['invalid']]} is not a valid regular expression: {answer['why']}.",
            where=where,
            fix=PATTERN_FIX,
        )
    first: list[int] = answer["first"]
    return first


@contextmanager
def _turn(where: str) -> Iterator[None]:
    """Wait until fewer than `MOST_SEARCHES` other searches run.

    Raises:
        MemPluginError: others took `SECONDS`.
    """
    if not _turns.acquire(timeout=SECONDS):
        raise MemPluginError(
            f"{MOST_SEARCHES} other searches have been running for {SECONDS:.0f} seconds.",
            where=where,
            fix="Try again when they have ended.",
        )
    try:
        yield
    finally:
        _turns.release()
