"""Custom rules, which name allocations by patterns that match the frames of their stacks."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Sequence
from dataclasses import dataclass
from pathlib import Path

from tb_memplugin.errors import MemPluginError
from tb_memplugin.trace import MemoryTrace
from tb_memplugin.trace.frames import distinct, lowest_in_stacks, read_frame
from tb_memplugin.trace.result import AnalysisResult
from tb_memplugin.trace.tables import Int64

UNKNOWN = "unknown"
"""Key of allocations that no rule matches."""

FIX = 'Write name=regex, or a JSON file: {"name": "regex"} or {"rules": [{"name": "…", "pattern": "…"}]}.'

MOST_BYTES = 1 << 20
"""The largest file of rules, in bytes."""

PATTERN_FIX = "To match one of . ( ) [ ] + * ? literally, put a backslash before it."


@dataclass(frozen=True, slots=True)
class Rules(AnalysisResult):
    """Named patterns in order. A stack gets the first name whose pattern occurs in any frame.

    As in Mosaic, a pattern is searched for (`re.search`, case-sensitive) in a frame's function and file, and
    the order of the rules decides, not that of the frames.
    """

    names: tuple[str, ...]
    patterns: tuple[re.Pattern[str], ...]

    @property
    def keys(self) -> tuple[str, ...]:
        """The names in order, followed by `UNKNOWN`."""
        return (*self.names, UNKNOWN)

    def rows(self, trace: MemoryTrace) -> Int64:
        """Return the index in `keys` of each of the trace's stacks, and last of "no stack": int64."""
        none = len(self.names)
        patterns = [_without_leading_any(pattern) for pattern in self.patterns]
        rank = {text: _first(patterns, text) for text in distinct(trace.stacks)}
        return lowest_in_stacks(rank, (*trace.stacks, ()), none)


def _first(patterns: Sequence[re.Pattern[str]], text: str) -> int:
    """Return the index of the first pattern in a frame's function or file; their number if none matches."""
    frame = read_frame(text)
    return next(
        (row for row, each in enumerate(patterns) if each.search(frame.function) or each.search(frame.file)),
        len(patterns),
    )


def _without_leading_any(pattern: re.Pattern[str]) -> re.Pattern[str]:
    """Drop a leading `.*`, which changes no match but makes searching take time quadratic in the text."""
    rest = pattern.pattern.removeprefix(".*")
    if rest == pattern.pattern or rest[:1] in ("?", "+", "*", "{"):
        return pattern
    return re.compile(rest, pattern.flags)


def read_rules(texts: Sequence[str]) -> Rules:
    """Read rules from command-line arguments, in the order given.

    Args:
        texts: each `name=regex`, the path of a JSON file, or JSON text. The JSON is an object of names and
            patterns, or `{"rules": [{"name": ..., "pattern": ...}]}`, whose other fields are ignored (both
            are forms of Mosaic's custom profiles). A text with "=" is read as a path if such a file exists.

    Raises:
        MemPluginError: a file does not exist or has no rules, a name occurs twice, or a pattern is invalid.
    """
    rules: dict[str, re.Pattern[str]] = {}
    for text in texts:
        for name, pattern, where in _rules_of(text):
            check_name(name, rules, where)
            rules[name] = _compiled(name, pattern, where)
    return Rules(tuple(rules), tuple(rules.values()))


def check_name(name: str, others: Container[str], where: str) -> None:
    """Refuse the name of a rule that other rules cannot have beside them.

    Raises:
        MemPluginError: another rule has it, or it is reserved.
    """
    if name in others or name == UNKNOWN:
        problem = "is reserved for what no rule matches" if name == UNKNOWN else "is used twice"
        raise MemPluginError(f"The rule name {name!r} {problem}.", where=where, fix="Give it another name.")


def _rules_of(text: str) -> list[tuple[str, str, str]]:
    """Return name, pattern and source of each rule in one argument."""
    name, equals, pattern = text.partition("=")
    if text.lstrip().startswith(("{", "[")):
        return [(*rule, "rules") for rule in _rules_in(_parsed(text, "rules"), "rules")]
    if equals and not _is_file(text):
        return [(*rule, text) for rule in _rules_in({name.strip(): pattern}, text)]
    try:
        with Path(text).open("rb") as file:
            content = file.read(MOST_BYTES + 1).decode()
        if len(content) > MOST_BYTES:
            raise ValueError("it is too large")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise MemPluginError(
            f"The rules file does not exist or cannot be read: {why}.", where=text, fix=FIX
        ) from error
    return [(*rule, text) for rule in _rules_in(_parsed(content, text), text)]


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except (OSError, ValueError):  # too long for a path, or with a NUL character
        return False


def _parsed(content: str, where: str) -> object:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise MemPluginError(f"The rules are not valid JSON: {error}.", where=where, fix=FIX) from error


def _rules_in(document: object, where: str) -> list[tuple[str, str]]:
    """Return names and patterns from either JSON form, in order.

    Raises:
        MemPluginError: the document has neither form.
    """
    if isinstance(document, dict) and isinstance(document.get("rules"), list):
        document = document["rules"]
    if isinstance(document, dict):
        rules = list(document.items())
    elif isinstance(document, list) and all(isinstance(item, dict) for item in document):
        rules = [(item.get("name"), item.get("pattern")) for item in document]
    else:
        raise MemPluginError("The file contains no rules.", where=where, fix=FIX)
    for rule in rules:
        if not all(isinstance(part, str) and part for part in rule):
            message = (
                f"Each rule needs a name and a pattern, both non-empty strings, but one is {str(rule)[:200]}."
            )
            raise MemPluginError(message, where=where, fix=FIX)
    return rules


def _compiled(name: str, pattern: str, where: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise MemPluginError(
            f"Rule {name[:80]!r} is not a valid regular expression: {error}.",
            where=f"{where}: {pattern[:200]}",
            fix=PATTERN_FIX,
        ) from error
