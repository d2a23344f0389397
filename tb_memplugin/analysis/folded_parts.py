"""Modules of any recording in the groups of one window, so that two recordings compare group by group."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from tb_memplugin.analysis.breakdown import Part, merged
from tb_memplugin.analysis.module_groups import OTHER_MODULES


def folded_parts(
    parts: Iterable[Part], group_of: Mapping[str, str], groups: Sequence[str]
) -> tuple[Part, ...]:
    """Parts by module as parts by group, whose bytes sum to the same.

    Args:
        parts: of any recording, one for each module.
        group_of: the group of every module of the window that was grouped.
        groups: the names of its groups. A module that the window does not have goes to the one that would
            hold it (`layers.30.mlp` to `layers.*.mlp`), else to the other modules.
    """
    patterns = sorted(((name.split("."), name) for name in groups), key=lambda one: -len(one[0]))
    found: dict[str, Part] = {}
    for part in parts:
        key = group_of.get(part.key) or _holder(part.key.split("."), patterns)
        moved = replace(part, key=key)
        found[key] = merged(found[key], moved) if key in found else moved
    return tuple(sorted(found.values(), key=lambda part: -part.bytes))


def _holder(key: Sequence[str], patterns: Sequence[tuple[list[str], str]]) -> str:
    """The deepest group whose name covers the key's beginning."""
    for pattern, name in patterns:
        if len(pattern) <= len(key) and all(map(_covers, pattern, key)):
            return name
    return OTHER_MODULES


def _covers(pattern: str, segment: str) -> bool:
    """`*` and `0-15` cover layers' numbers; what is no number covers itself."""
    if pattern == segment:
        return True
    first, dash, last = pattern.partition("-")
    if not (segment.isascii() and segment.isdigit() and len(segment) < 10):
        return False
    is_range = dash and first.isascii() and first.isdigit() and last.isascii() and last.isdigit()
    return pattern == "*" or bool(is_range and int(first) <= int(segment) <= int(last))
