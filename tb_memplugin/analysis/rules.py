"""Custom rules: names for allocations by patterns on the frames of their stacks."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tb_memplugin.errors import MemPluginError
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.frames import distinct, lowest_in_stacks, read_frame
from tb_memplugin.trace.tables import Int64

UNKNOWN = "unknown"
"""Key of what no rule matches."""

FIX = 'Write name=regex, or a JSON file: {"name": "regex"} or {"rules": [{"name": "…", "pattern": "…"}]}.'


@dataclass(frozen=True, slots=True)
class Rules:
    """Named patterns in order. The first one found in any frame's function or file names a stack.

    As in Mosaic: `re.search`, case matters, and the order of the rules decides, not that of the frames.
    """

    names: tuple[str, ...]
    patterns: tuple[re.Pattern[str], ...]

    @property
    def keys(self) -> tuple[str, ...]:
        """The names in order, and `UNKNOWN` behind them."""
        return (*self.names, UNKNOWN)

    def rows(self, trace: MemoryTrace) -> Int64:
        """The row in `keys` for each of the trace's stacks, and last for "no stack": int64."""
        none = len(self.names)
        found = [_without_leading_any(pattern) for pattern in self.patterns]
        rank = {text: _first(found, text) for text in distinct(trace.stacks)}
        return lowest_in_stacks(rank, (*trace.stacks, ()), none)


def _first(patterns: Sequence[re.Pattern[str]], text: str) -> int:
    """The first pattern that a frame has in its function or file, their number where none is."""
    frame = read_frame(text)
    return next(
        (row for row, each in enumerate(patterns) if each.search(frame.function) or each.search(frame.file)),
        len(patterns),
    )


def _without_leading_any(pattern: re.Pattern[str]) -> re.Pattern[str]:
    """A pattern found in the same texts: `.*x` is searched for in a time that grows with their square."""
    rest = pattern.pattern.removeprefix(".*")
    if rest == pattern.pattern or rest[:1] in ("?", "+", "*", "{"):
        return pattern
    return re.compile(rest, pattern.flags)


def read_rules(texts: Sequence[str]) -> Rules:
    """Rules from a command line, in the order given.

    Args:
        texts: each `name=regex`, or the path of a JSON file, or JSON itself: an object of names and
            patterns, or `{"rules": [{"name": ..., "pattern": ...}]}`, whose other fields are not read
            (both forms of Mosaic's custom profiles). A text with "=" is a path where such a file exists.

    Raises:
        MemPluginError: a file that is absent or holds no rules, a name twice, an invalid pattern.
    """
    rules: dict[str, re.Pattern[str]] = {}
    for text in texts:
        for name, pattern, where in _rules_of(text):
            if name in rules or name == UNKNOWN:
                what = "is for what no rule matches" if name == UNKNOWN else "stands there twice"
                raise MemPluginError(
                    f"The rule name {name!r} {what}.", where=where, fix="Give it another name."
                )
            rules[name] = _compiled(name, pattern, where)
    return Rules(tuple(rules), tuple(rules.values()))


def _rules_of(text: str) -> list[tuple[str, str, str]]:
    """Name, pattern and where they stand."""
    name, equals, pattern = text.partition("=")
    if text.lstrip().startswith(("{", "[")):
        return [(*rule, "rules") for rule in _rules_in(_parsed(text, "rules"), "rules")]
    if equals and not _is_file(text):
        return [(*rule, text) for rule in _rules_in({name.strip(): pattern}, text)]
    try:
        content = Path(text).read_text("utf-8")
    except (OSError, ValueError) as error:
        raise MemPluginError("The rules cannot be read: no such JSON file.", where=text, fix=FIX) from error
    return [(*rule, text) for rule in _rules_in(_parsed(content, text), text)]


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # longer than a path may be, or with a NUL
        return False


def _parsed(content: str, where: str) -> object:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise MemPluginError(f"The rules are no JSON: {error}.", where=where, fix=FIX) from error


def _rules_in(document: object, where: str) -> list[tuple[str, str]]:
    """Names and patterns of either JSON form, in order.

    Raises:
        MemPluginError: neither form.
    """
    if isinstance(document, dict) and isinstance(document.get("rules"), list):
        document = document["rules"]
    if isinstance(document, dict):
        rules = list(document.items())
    elif isinstance(document, list) and all(isinstance(item, dict) for item in document):
        rules = [(item.get("name"), item.get("pattern")) for item in document]
    else:
        raise MemPluginError("The file holds no rules.", where=where, fix=FIX)
    for rule in rules:
        if not all(isinstance(part, str) and part for part in rule):
            what = f"A rule needs a name and a pattern, two texts; one is {str(rule)[:200]}."
            raise MemPluginError(what, where=where, fix=FIX)
    return rules


def _compiled(name: str, pattern: str, where: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise MemPluginError(
            f"Rule {name[:80]!r} is no valid regular expression: {error}.",
            where=f"{where}: {pattern[:200]}",
            fix="Escape . ( ) [ ] + * ? with a backslash where they stand for themselves.",
        ) from error
